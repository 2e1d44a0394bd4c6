"""Recomputation by rule: what each policy keeps on every kind of model, and that torch's checkpointing keeps it too."""

from __future__ import annotations

from functools import partial

import pytest
from support.steps.planned_steps import real_step
from support.steps.planned_steps import traced_step as planned_step
from support.steps.traced_steps import ALL_STEPS, traced_step
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from planner.graph.operator_graph import OperatorGraph, OutputRole, Phase
from planner.graph.view_chains import view_chains
from planner.strategies.baselines import (
    BASELINES,
    checkpoint_dots,
    full_checkpoint,
    megatron_selective,
    surviving_values,
)
from planner.strategies.blocks import block_of_path, operator_blocks
from planner.torch_adapter.tracing.step_module import step_loss

DOTS = {
    "aten.mm.default",
    "aten.addmm.default",
    "aten.bmm.default",
    "aten.convolution.default",
    "aten._scaled_dot_product_flash_attention_for_cpu.default",
}
KERNEL = "_scaled_dot_product_flash_attention_for_cpu"
UNFUSED = ("bmm", "_safe_softmax", "native_dropout")
CORES = {
    "gpt2": {f"transformer.h.{k}.attn": (KERNEL,) for k in range(2)},
    "llama": {f"model.layers.{k}.self_attn": (KERNEL,) for k in range(2)},
    "vit": {f"vit.layers.{k}.attention": (KERNEL,) for k in range(2)},
    "bert": {f"bert.encoder.layer.{k}.attention.self": UNFUSED for k in range(2)},
    "dropout_gpt": {f"layers.{k}.attention": ("bmm", "add", *UNFUSED[1:]) for k in range(2)},
    "t5": {
        f"{stack}.block.{k}.layer.{layer}.{kind}Attention": ("bmm", "add", *UNFUSED[1:])
        for stack, layer, kind in (("encoder", 0, "Self"), ("decoder", 0, "Self"), ("decoder", 1, "EncDec"))
        for k in range(2)
    },
    "conv_net": {},
    "res_net": {},
    "mixture_of_experts": {},
}
"""Attention cores by module: names of the operators that run again, in order."""

BLOCKS = {
    "gpt2": ["transformer.h.0", "transformer.h.1"],
    "llama": ["model.layers.0", "model.layers.1"],
    "bert": ["bert.encoder.layer.0", "bert.encoder.layer.1"],
    "vit": ["vit.layers.0", "vit.layers.1"],
    "t5": ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    "dropout_gpt": ["layers.0", "layers.1"],
}


def producers(graph: OperatorGraph) -> list[set[int]]:
    """Per operator, the forward operators whose storages it reads; views have none."""
    chains = view_chains(graph)
    found = []
    for operator in graph.operators:
        bases = [] if operator.is_view else [graph.values[chains[value].base].producer for value in operator.inputs]
        found.append({p for p in bases if p is not None and graph.operators[p].phase is Phase.FORWARD})
    return found


def makers_of_results(graph: OperatorGraph) -> set[int]:
    chains = view_chains(graph)
    return {
        graph.values[chains[output.value].base].producer
        for output in graph.outputs
        if output.role is not OutputRole.GRADIENT
    } - {None}


def survivors_in_blocks(graph: OperatorGraph, recomputed) -> dict[str, list[str]]:
    """Names of the operators whose outputs survive inside blocks, by block."""
    found: dict[str, list[str]] = {}
    for value in sorted(surviving_values(graph, recomputed)):
        operator = graph.operators[graph.values[value].producer]
        block = block_of_path(operator.module_path)
        if block is not None:
            found.setdefault(block, []).append(f"{operator.module_path}:{operator.target.split('.')[1]}")
    return found


@pytest.mark.parametrize("policy", BASELINES)
@pytest.mark.parametrize("name", ALL_STEPS)
def test_what_runs_again_is_needed_and_can_run(name, policy):
    graph = traced_step(name).graph
    recomputed, reads = BASELINES[policy](graph), producers(graph)
    needed = {
        producer
        for operator in graph.operators
        if operator.phase is Phase.BACKWARD or operator.index in recomputed
        for producer in reads[operator.index]
    }
    assert recomputed <= needed, "nothing runs again for nobody"
    assert not recomputed & makers_of_results(graph)
    kept = {graph.values[value].producer for value in surviving_values(graph, recomputed)}
    assert kept == needed - recomputed, "every input of what runs is kept or runs before"
    assert not any(graph.operators[index].is_view for index in recomputed)


@pytest.mark.parametrize("name", ALL_STEPS)
def test_checkpoint_dots_keeps_products_convolutions_and_attention_only(name):
    graph = traced_step(name).graph
    recomputed = checkpoint_dots(graph)
    assert recomputed
    assert not {graph.operators[index].target for index in recomputed} & DOTS
    for value in surviving_values(graph, recomputed):
        producer = graph.values[value].producer
        assert graph.operators[producer].target in DOTS or producer in makers_of_results(graph)


@pytest.mark.parametrize("name", ALL_STEPS)
def test_megatron_selective_runs_the_core_of_attention_again(name):
    graph = traced_step(name).graph
    found: dict[str, list[str]] = {}
    for index in sorted(megatron_selective(graph)):
        operator = graph.operators[index]
        found.setdefault(operator.module_path, []).append(operator.target.split(".")[1])
    assert {path: tuple(names) for path, names in found.items()} == CORES[name]


@pytest.mark.parametrize("name", BLOCKS)
def test_full_checkpoint_keeps_what_crosses_a_boundary_only(name):
    graph = traced_step(name).graph
    recomputed = full_checkpoint(graph)
    blocks = operator_blocks(graph)
    assert {blocks[index] for index in recomputed} == set(BLOCKS[name])
    survivors = survivors_in_blocks(graph, recomputed)
    assert list(survivors) == BLOCKS[name]
    end = {
        "bert": lambda block: [f"{block}.output.LayerNorm:native_layer_norm"] * 3,
        "t5": lambda block: [f"{block}.layer.{1 if block[0] == 'e' else 2}:add"],
    }.get(name, lambda block: [f"{block}:add"])
    shared = {
        ("t5", "encoder.block.0"): ["encoder.block.0.layer.0.SelfAttention.relative_attention_bias:embedding"],
        ("t5", "decoder.block.0"): [
            "decoder.block.0.layer.0.SelfAttention.relative_attention_bias:embedding",
            "decoder.block.0.layer.1.EncDecAttention:zeros",
        ],
    }
    for block, survived in survivors.items():
        assert survived == [*shared.get((name, block), []), *end(block)]


def test_full_checkpoint_of_stages_of_convolutions():
    graph = traced_step("res_net").graph
    recomputed = full_checkpoint(graph)
    names = {graph.operators[index].target for index in recomputed}
    assert "aten.convolution.default" in names
    assert "aten._native_batch_norm_legit_functional.default" not in names, "it makes the new running statistics"
    last = [survived[-1] for survived in survivors_in_blocks(graph, recomputed).values()]
    assert last == ["stem.0:convolution", "stem.1:_native_batch_norm_legit_functional", "stem.2:relu"] + [
        f"blocks.{k}:relu" for k in range(2)
    ]


@pytest.mark.parametrize("name", ["conv_net", "mixture_of_experts"])
def test_a_model_without_blocks_is_left_as_it_is(name):
    assert full_checkpoint(traced_step(name).graph) == frozenset()


def test_random_operators_may_run_again():
    graph = traced_step("dropout_gpt").graph
    for policy in BASELINES.values():
        assert any(graph.operators[index].is_random for index in policy(graph))


@pytest.mark.parametrize(
    ("path", "block"),
    [
        ("transformer.h.3.mlp.c_fc", "transformer.h.3"),
        ("encoder.block.0.layer.1.DenseReluDense", "encoder.block.0"),
        ("layers.12", "layers.12"),
        ("conv1", None),
        ("", None),
    ],
)
def test_blocks_of_paths(path, block):
    assert block_of_path(path) == block


CHECKPOINTED = {
    "gpt": lambda module: module.layers,
    "gpt2": lambda module: module.transformer.h,
    "vit": lambda module: module.vit.layers,
    "llama": lambda module: module.model.layers,
}


def bytes_saved_by_torch(name: str) -> tuple[int, list[int]]:
    """Bytes that autograd saves with ``torch.utils.checkpoint`` around every block: all, and inside each block."""
    step = real_step(name)
    given = [*step.module.parameters(), *step.module.buffers(), *step.example_args, *step.example_kwargs.values()]
    not_activations = {tensor.untyped_storage().data_ptr() for tensor in given}
    alive, saved = [], {}
    in_block: list[dict[int, int]] = []
    inside = False

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in not_activations:
            alive.append(tensor)  # so that no other storage gets its address
            saved[storage.data_ptr()] = storage.nbytes()
            if inside:
                in_block[-1][storage.data_ptr()] = storage.nbytes()
        return tensor

    def checkpointed(forward, *args, **kwargs):
        nonlocal inside
        in_block.append({})
        inside = True
        result = checkpoint(partial(forward, **kwargs), *args, use_reentrant=True)
        inside = False
        return result

    for block in CHECKPOINTED[name](step.module):
        block.forward = partial(checkpointed, block.forward)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        step_loss(step.module, step.example_args, dict(step.example_kwargs), step.loss_fn)
    return sum(saved.values()), [sum(sizes.values()) for sizes in in_block]


@pytest.mark.parametrize("name", CHECKPOINTED)
def test_full_checkpoint_keeps_the_bytes_that_torch_keeps(name):
    graph = planned_step(name).graph
    kept = [graph.values[value] for value in surviving_values(graph, full_checkpoint(graph))]
    total, per_block = bytes_saved_by_torch(name)
    # What a block gets by keyword (rotary angles) stays alive in torch too, but no hook sees it.
    angles = sum(value.spec.nbytes for value in kept if "rotary_emb" in value.name)
    assert (angles > 0) == (name == "llama")
    assert sum(value.spec.nbytes for value in kept) - angles == total
    outputs = [
        value for value in kept if block_of_path(graph.operators[value.producer].module_path) is not None
    ]  # a block's output is the next one's input
    assert [value.spec.nbytes for value in sorted(outputs, key=lambda value: value.index)] == per_block
