"""Traced steps folded into layers: beside the module, the replay of the same graph, and the presets' formulas.

What tensor parallelism divides by structure (:mod:`planner.layers.profiles.tensor_split`) is compared with the verified
sharding rules of the same operators here too, as every capture takes seconds.
"""

from __future__ import annotations

from functools import cache

import pytest
from support.layers.layer_models import OWN, SEQUENCE, TRANSFORMERS, traced_batch, training_step
from support.steps.plain_schedule import replicated_schedule
from support.tiers import only

from formulations.layers.layer import ProfileSource
from planner.graph.operator_graph import Phase
from planner.graph.optimizers import optimizer_named
from planner.graph.placement import REPLICATE, is_partial, is_shard
from planner.graph.view_chains import view_chains
from planner.layers.presets.formulas import RELU, BlockShape, FormulaDevice, attention, feed_forward
from planner.layers.presets.transformer import Stack
from planner.layers.profiles.folding import FoldingError, fold_layers
from planner.layers.profiles.regions import joined_regions, module_regions
from planner.layers.profiles.tensor_split import divided_module
from planner.machine.cluster import load_cluster
from planner.machine.costs import CostModel
from planner.replay.checker import OptimizerMemory, replay
from planner.replay.report import Category
from planner.schedule.instructions import Compute
from planner.strategies.sharding_rules import Strategy, axis_rules

TITAN = load_cluster("titan-rtx-8-pcie")
BATCHES = (2, 4)
FAST = ("gpt2", "t5", "res_net", "conv_net", "tied_gpt", "mlp", "experts")
"""Models of `make test`; every capture of a transformer takes seconds, at each of two batches."""
LINEAR = tuple(name for name in (*TRANSFORMERS, *OWN) if name != "experts")
"""Models whose storages grow with the batch and no faster; the places of experts are tokens times capacity."""


@cache
def folded(name, apart=False):
    smaller, larger = (traced_batch(name, batch) for batch in BATCHES)
    return fold_layers(smaller, larger, BATCHES, TITAN, name=name, apart=apart)


@cache
def replayed(name, batch):
    """Bytes of activations while each operator runs, and when forward ends: no parameters, gradients or samples."""
    graph = traced_batch(name, batch).graph
    schedule = replicated_schedule(graph, (1,))
    report = replay(graph, schedule, optimizer=OptimizerMemory(optimizer_named("sgd")))
    assert not report.violations
    profile = report.profile
    during = profile.total_during - sum(
        profile.during(category)
        for category in (Category.PARAMETERS, Category.MODULE_BUFFERS, Category.INPUTS, Category.GRADIENTS)
    )
    alive, end = {}, 0
    for at, instruction in enumerate(schedule.instructions):
        if isinstance(instruction, Compute) and not graph.operators[instruction.operator].is_view:
            alive[instruction.operator] = int(during[at])
            if graph.operators[instruction.operator].phase is Phase.FORWARD:
                end = at
    while not isinstance(schedule.instructions[end + 1], Compute):
        end += 1
    after = profile.after
    kept = sum(int(after[category][end]) for category in (Category.ACTIVATIONS, Category.RESHARDED))
    return alive, kept


EXPECTED = {
    "gpt2": ["embedding", "transformer.h.0", "transformer.h.1", "head"],
    "bert": ["embedding", "bert.encoder.layer.0", "bert.encoder.layer.1", "head"],
    "t5": [
        "embedding",
        "encoder.block.0",
        "encoder.block.1",
        "bridge",
        "decoder.block.0",
        "decoder.block.1",
        "head",
    ],
    "vit": ["embedding", "vit.layers.0", "vit.layers.1", "head"],
    "swin": [
        "embedding",
        *(f"swin.encoder.layers.{stage}.blocks.{k}" for stage, depth in enumerate((1, 2)) for k in range(depth)),
        "head",
    ],
    "res_net": ["embedding", "blocks.0", "blocks.1", "head"],
    "conv_net": ["conv1", "conv2", "norm", "conv3", "head"],
    "tied_gpt": ["embedding", "layers.0", "layers.1", "head"],
    "mlp": ["0", "2"],
    "experts": ["embedding", "layers.0", "layers.1", "head"],
}


@pytest.mark.parametrize("name", only(FAST, EXPECTED))
def test_blocks_are_layers_and_so_is_what_lies_around_them(name):
    assert [layer.name for layer in folded(name).layers] == EXPECTED[name]


@pytest.mark.slow
def test_attention_and_feed_forward_modules_apart():
    names = [layer.name for layer in folded("t5", apart=True).layers]
    assert names[4:9] == [
        "encoder.block.1.mlp",
        "bridge",
        "decoder.block.0.attention",
        "decoder.block.0.cross_attention",
        "decoder.block.0.mlp",
    ]
    swin = [layer.name.removeprefix("swin.encoder.layers.") for layer in folded("swin", apart=True).layers]
    assert swin[1:6] == [
        "0.blocks.0.attention",
        "0.blocks.0.mlp",
        "0.blocks.0.tail",
        "1.blocks.0.attention",
        "1.blocks.0.mlp",
    ]
    for model in ("gpt2", "bert", "vit"):
        roles = [layer.name.rpartition(".")[2] for layer in folded(model, apart=True).layers]
        assert roles == ["embedding", "attention", "mlp", "attention", "mlp", "head"]


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", only(FAST, EXPECTED))
def test_parameters_are_the_modules_to_the_byte(name, apart):
    module = training_step(name, BATCHES[0]).module
    assert folded(name, apart).parameter_bytes == sum(p.numel() * p.element_size() for p in module.parameters())


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", only(FAST, LINEAR))
def test_what_layers_keep_is_what_the_replay_keeps_to_the_byte(name, apart):
    chain = folded(name, apart)
    fixed = sum(layer.fixed_saved_bytes for layer in chain.layers)
    for batch in BATCHES:
        _, kept = replayed(name, batch)
        assert batch * chain.activation_bytes + fixed == kept


@pytest.mark.parametrize("name", ["gpt2", "res_net"])
def test_the_line_meets_a_third_batch(name):
    chain = folded(name)
    _, kept = replayed(name, 7)
    assert 7 * chain.activation_bytes + sum(layer.fixed_saved_bytes for layer in chain.layers) == kept


@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("name", only(FAST, LINEAR))
def test_peaks_of_layers_bound_the_replay_and_the_highest_is_met(name, apart):
    chain, graph = folded(name, apart), traced_batch(name, BATCHES[0]).graph
    modules = module_regions(graph)
    layers = {index: at for at, group in enumerate(joined_regions(modules)) for r in group for index in r.operators}
    apart_layers = {index: at for at, region in enumerate(modules) for index in region.operators}
    of_forward = apart_layers if apart else layers
    regions = dict(of_forward)
    for operator in graph.operators:
        if operator.phase is Phase.BACKWARD and operator.forward is not None:
            regions[operator.index] = of_forward[operator.forward]
    for batch in BATCHES:
        alive, _ = replayed(name, batch)
        highest_of = {(layer, phase): 0 for layer in range(len(chain)) for phase in Phase}
        for operator, nbytes in alive.items():
            if operator not in regions:
                continue  # a sum of gradients; the highest moment of all is checked below
            key = (regions[operator], graph.operators[operator].phase)
            highest_of[key] = max(highest_of[key], nbytes)
        held, peaks = 0, []
        for position, layer in enumerate(chain.layers):
            given = layer.input_bytes - layer.unread_input_bytes if position else 0
            held += batch * (given + layer.saved_bytes) + layer.fixed_saved_bytes
            forward = batch * (layer.output_bytes + layer.forward_workspace_bytes)
            backward = batch * layer.backward_workspace_bytes
            peaks.append(held + forward + layer.forward_fixed_workspace_bytes)
            assert highest_of[position, Phase.FORWARD] <= peaks[-1]
            peaks.append(held + backward + layer.backward_fixed_workspace_bytes)
            assert highest_of[position, Phase.BACKWARD] <= peaks[-1]
        highest = max(alive.values())
        assert highest <= max(peaks) <= 1.02 * highest + 1024


@pytest.mark.parametrize("name", ["gpt2", "t5", "res_net"])
def test_seconds_are_those_of_the_cost_model(name):
    chain = folded(name)
    for batch in BATCHES:
        graph, costs = traced_batch(name, batch).graph, CostModel(TITAN, (1,))
        seconds = dict.fromkeys(Phase, 0.0)
        for operator in graph.operators:
            outputs = tuple(None if value is None else (REPLICATE,) for value in operator.outputs)
            whole = Strategy(outputs, ((REPLICATE,),) * len(operator.inputs), ())
            seconds[operator.phase] += float(costs.operator_seconds(graph, operator, (whole,))[0])
        forward = sum(batch * layer.forward_seconds + layer.forward_fixed_seconds for layer in chain.layers)
        backward = sum(batch * layer.backward_seconds + layer.backward_fixed_seconds for layer in chain.layers)
        assert forward == pytest.approx(seconds[Phase.FORWARD])
        assert backward == pytest.approx(seconds[Phase.BACKWARD])


def test_sources_say_what_they_are():
    layers = folded("gpt2").layers
    assert {layer.bytes_source for layer in layers} == {ProfileSource.FITTED}
    assert {layer.seconds_source for layer in layers} == {ProfileSource.PRESET}  # a cluster of data sheets


def test_equal_layers_have_one_kind():
    kinds = {layer.name: layer.kind for layer in folded("gpt2").layers}
    assert kinds["transformer.h.1"] == "transformer.h.0"
    unlike = {layer.name: layer.kind for layer in folded("experts").layers}
    assert unlike["layers.1"] == "layers.1"


def test_tied_weights_are_counted_once_and_said():
    chain = folded("gpt2")
    table = 96 * 32 * 4
    assert chain.layers[0].parameter_bytes >= table
    assert chain.layers[-1].borrowed_parameter_bytes == table
    assert any("lm_head.weight is transformer.wte.weight: counted once, in embedding" in note for note in chain.notes)


def test_an_encoders_output_is_carried_to_its_last_reader():
    memory = SEQUENCE * 32 * 4
    by_name = {layer.name: layer for layer in folded("t5").layers}
    assert by_name["bridge"].output_bytes == 2 * memory
    assert by_name["decoder.block.0"].input_bytes == 2 * memory
    assert by_name["decoder.block.1"].carried_bytes == memory
    assert by_name["head"].carried_bytes == 0


def test_bytes_that_grow_faster_than_the_batch_are_bounds_and_said():
    chain = folded("experts")
    assert any("grow faster than the batch in layers.1" in note for note in chain.notes)
    for batch in BATCHES:
        _, kept = replayed("experts", batch)
        fixed = sum(layer.fixed_saved_bytes for layer in chain.layers)
        assert batch * chain.activation_bytes + fixed >= kept


SHAPES = {
    "gpt2": BlockShape(32, 4, 8, 128, 4, activation=5),
    "bert": BlockShape(32, 4, 8, 64, 4),
    "t5": BlockShape(32, 4, 8, 64, 4, bias=False, inner_dropout=True, activation=RELU, norm_tensors=2),
}


@pytest.mark.slow_cases("bert")
@pytest.mark.parametrize("name", SHAPES)
def test_formulas_are_the_captured_blocks_to_the_byte(name):
    """Parameters, storages and what tensor parallelism divides, of the last block and of its modules."""
    shape = SHAPES[name]
    modules = [("attention", attention(shape, SEQUENCE, SEQUENCE)), ("mlp", feed_forward(shape, SEQUENCE))]
    if name == "t5":
        modules.insert(1, ("cross_attention", attention(shape, SEQUENCE, SEQUENCE, SEQUENCE)))
    for apart in (False, True):
        wanted = Stack(FormulaDevice(TITAN, "float32"), apart).block("block", "block", shape, SEQUENCE, modules)
        found = folded(name, apart).layers[-1 - len(wanted) : -1]
        for formula, layer in zip(wanted, found, strict=True):
            assert layer.parameter_bytes == formula.parameter_bytes
            assert layer.saved_bytes == formula.saved_bytes
            assert layer.output_bytes == formula.output_bytes
            # Workspaces are estimates: one gradient more or less at the worst moment.
            assert 0.8 <= formula.backward_workspace_bytes / layer.backward_workspace_bytes <= 1.4
            assert formula.forward_workspace_bytes >= layer.forward_workspace_bytes
            assert layer.split.divisor == formula.split.divisor
            assert layer.split.parameter_bytes == formula.split.parameter_bytes
            assert layer.split.saved_bytes == formula.split.saved_bytes
            assert layer.split.reduced_bytes == formula.split.reduced_bytes


def test_experts_and_convolutions_are_not_divided():
    by_name = {layer.name: layer for layer in folded("experts", apart=True).layers}
    assert by_name["layers.1.attention"].split.divisor == 4
    assert by_name["layers.1.mlp"].split.divisor == 0
    assert all(layer.split.divisor == 0 for layer in folded("res_net").layers)


def test_gradients_inside_a_divided_module_are_divided():
    """GPT-2's GELU in steps is the worst moment: gradients of the inner width, and two of hidden size."""
    block = folded("gpt2").layers[1]
    wide, hidden = SEQUENCE * 128 * 4, SEQUENCE * 32 * 4
    assert block.backward_workspace_bytes < wide + 2 * hidden
    assert block.split.backward_workspace_bytes > block.backward_workspace_bytes - 3 * hidden
    assert block.split.backward_seconds > 0.9 * block.backward_seconds


def test_the_loss_needs_its_workspace_before_the_head_needs_a_parameter():
    """Two gradients as large as the logits; and then a tied weight's gradient but for what was freed."""
    *others, head = folded("gpt2").layers
    logits = head.backward_workspace_bytes // 2
    assert head.forward_workspace_bytes + head.saved_bytes >= 2 * logits >= 2 * (SEQUENCE - 1) * 4
    assert (head.backward_fixed_workspace_bytes, head.late_workspace_bytes) == (0, 0)
    assert 0 < head.late_fixed_workspace_bytes <= head.borrowed_parameter_bytes == head.largest_parameter_bytes
    for layer in others:
        assert layer.late_workspace_bytes <= layer.backward_workspace_bytes
        assert layer.largest_parameter_bytes < layer.parameter_bytes


@pytest.mark.fast_cases("gpt2", "t5")
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_figures_of_the_group_never_exceed_those_of_one_device(name):
    for layer in folded(name).layers:
        share = layer.on_one_of(2)
        for field in ("parameter_bytes", "saved_bytes", "forward_seconds", "backward_workspace_bytes"):
            assert getattr(share, field) <= getattr(layer, field)


def test_batches_and_steps_that_do_not_belong_together_are_refused():
    smaller, larger = (traced_batch("mlp", batch) for batch in BATCHES)
    with pytest.raises(FoldingError, match="batches of 4 and 2: give two sizes, the smaller one first"):
        fold_layers(larger, smaller, (4, 2), TITAN, name="mlp")
    with pytest.raises(FoldingError, match="mlp has other operators at batch 2 than at batch 4"):
        fold_layers(smaller, traced_batch("conv_net", 4), BATCHES, TITAN, name="mlp")
    with pytest.raises(FoldingError, match="mlp has the same inputs at batch 2 as at batch 4: let its function take"):
        fold_layers(smaller, smaller, BATCHES, TITAN, name="mlp")


def lawful(rule, graph, operator, small, partial):
    """Whether a rule shards exactly the divided tensors; a bias beside a pending sum may be whole or a part of it."""
    beside_sum = [partial and len(graph.values[value].spec.shape) == 1 for value in operator.inputs]
    given = all(
        free or is_shard(word) == (value in small)
        for value, word, free in zip(operator.inputs, rule.inputs, beside_sum, strict=True)
    )
    wanted = is_partial if partial else is_shard
    return given and all(word is None or wanted(word) for word in rule.outputs)


@pytest.mark.slow_cases("bert")
@pytest.mark.parametrize("name", ["bert", "t5"])
def test_verified_rules_allow_every_division(name):
    traced = traced_batch(name, 4)
    graph = traced.graph
    rules, _ = axis_rules(traced, 2)
    bases = tuple(chain.base for chain in view_chains(graph))
    checked = 0
    for region in module_regions(graph):
        divided = divided_module(graph, region, bases)
        owners = divided.values | divided.parameters
        small = {value.index for value in graph.values if bases[value.index] in owners}
        for index in divided.operators:
            operator = graph.operators[index]
            partial = any(value in divided.reduced for value in operator.outputs)
            assert any(lawful(rule, graph, operator, small, partial) for rule in rules[index]), operator.identity
            checked += 1
    assert checked >= 34


def test_a_fused_projection_is_divided_by_heads():
    traced = traced_batch("gpt2", 4)
    graph, bases = traced.graph, tuple(chain.base for chain in view_chains(traced.graph))
    attention = next(region for region in module_regions(graph) if region.role == "attention")
    divided = divided_module(graph, attention, bases)
    names = {graph.values[value].name.removeprefix("transformer.h.0.attn.") for value in divided.parameters}
    assert divided.divisor == 4
    assert names == {"c_attn.weight", "c_attn.bias", "c_proj.weight"}  # the bias behind the sum is whole


def test_ends_of_a_model_are_not_divided():
    traced = traced_batch("gpt2", 4)
    bases = tuple(chain.base for chain in view_chains(traced.graph))
    regions = module_regions(traced.graph)
    for region in (regions[0], regions[-1]):
        divided = divided_module(traced.graph, region, bases)
        assert divided.divisor == 0
        assert not divided.operators
