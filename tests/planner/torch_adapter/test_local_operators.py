"""Local operators on simulated ranks reproduce the operators on whole tensors."""

from __future__ import annotations

import random
import threading
import time

import pytest
import torch
from support.steps.traced_steps import ALL_STEPS, traced_step
from support.tiers import only, slow
from torch._inductor import metrics

from planner.graph.operator_graph import Operator, OperatorGraph, Phase, TensorSpec, Value, ValueRole
from planner.graph.placement import local_shape
from planner.strategies.sharding_rules import axis_rules, compose
from planner.torch_adapter.local import counter_random
from planner.torch_adapter.local.attention import blockwise_backward, blockwise_forward
from planner.torch_adapter.local.calls import OperatorCall, Slot
from planner.torch_adapter.local.context import LocalContext, LocalOperator, UnsupportedOperatorError, bind
from planner.torch_adapter.local.operators import build_local, run_local
from planner.torch_adapter.rules.reference_inputs import SmallInstance
from planner.torch_adapter.rules.simulated_ranks import MismatchError, compare, join, run_ranks, split
from planner.torch_adapter.rules.table import candidate_rules, signature
from planner.torch_adapter.rules.verification import (
    Reference,
    make_reference,
    reference_of,
    rule_failure,
    strategy_failure,
)

aten = torch.ops.aten
MESH = (2, 2)


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))


def spec(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(shape, tuple(torch.empty(shape, device="meta").stride()), dtype)


def call_of(target, *args, **kwargs) -> OperatorCall:
    return OperatorCall.from_template(target, args, kwargs)


def distinct_operators(step):
    """One operator per signature, with its call and its specs."""
    seen = set()
    for operator, call in zip(step.graph.operators, step.calls, strict=True):
        inputs = tuple(step.graph.values[index].spec for index in operator.inputs)
        outputs = tuple(None if index is None else step.graph.values[index].spec for index in operator.outputs)
        key = signature(call, inputs, outputs)
        if key not in seen:
            seen.add(key)
            yield operator, call, inputs, outputs


def real_reference(call, inputs, outputs) -> Reference:
    """Reference at the sizes of the step itself."""
    shapes = tuple(None if output is None else output.shape for output in outputs)
    reference = reference_of(SmallInstance(call, bind(call, len(inputs)), inputs, shapes), outputs)
    assert reference is not None, str(call.target)
    return reference


@pytest.mark.parametrize("mesh", [(2, 2), slow((4,))], ids=["2x2", "4"])
@pytest.mark.parametrize("name", only(("gpt2", "llama", "t5", "conv_net", "mixture_of_experts"), ALL_STEPS))
def test_composed_strategies_reproduce_every_operator_on_four_ranks(name, mesh):
    """Rules are checked on two ranks before they are believed; here their compositions and a longer axis are."""
    step, chooser = traced_step(name), random.Random(f"{name} {mesh}")
    tables = [axis_rules(step, size)[0] for size in mesh]
    tried = 0
    for operator, call, inputs, outputs in distinct_operators(step):
        strategies = compose(operator, step.graph, [table[operator.index] for table in tables], mesh)
        reference = real_reference(call, inputs, outputs)
        for strategy in chooser.sample(strategies, min(4, len(strategies))):
            failure = strategy_failure(
                reference, strategy.outputs, strategy.inputs, mesh, collectives=bool(strategy.collectives)
            )
            assert failure is None, (operator.identity, strategy, failure)
            tried += 1
    assert tried > 100


@pytest.mark.parametrize("name", ["llama", "conv_net", "mixture_of_experts"])
def test_small_instances_judge_rules_as_the_real_sizes_do(name):
    for operator, call, inputs, outputs in distinct_operators(traced_step(name)):
        small, real = make_reference(call, inputs, outputs, 2), real_reference(call, inputs, outputs)
        assert small is not None, operator.identity
        for rule in candidate_rules(call, inputs, outputs, 2) or ():
            try:
                parts = [split(tensor, (word,), (2,)) for tensor, word in zip(real.tensors, rule.inputs, strict=True)]
            except (MismatchError, RuntimeError):
                continue  # the real sizes do not divide
            assert len(parts) == len(inputs)
            if all(divides_output(word, output) for word, output in zip(rule.outputs, outputs, strict=True)):
                assert (rule_failure(small, rule) is None) == (rule_failure(real, rule) is None), (operator, rule)


def divides_output(word, output) -> bool:
    return word is None or output is None or word[0] != "S" or output.shape[int(word[1:])] % 2 == 0


def dropout_on(placement, tensor, seed=7, stream=3, probability=0.3):
    """Output and mask of dropout on a 2x2 mesh, put together."""
    call, whole = call_of(aten.native_dropout.default, Slot(0), probability, True), spec(*tensor.shape)
    value = Value(0, "x", whole, ValueRole.ACTIVATION)
    mask = Value(1, "m", spec(*tensor.shape, dtype="bool"), ValueRole.ACTIVATION)
    operator = Operator(
        stream, "dropout", "dropout", "aten.native_dropout.default", "", Phase.FORWARD, (0,), (0, 1), False, True, 0
    )
    graph = OperatorGraph((value, mask), (operator,), (0,), ())
    parts = split(tensor, placement, MESH)

    def run(coordinate, reducer):
        function = build_local(call, operator, graph, (placement,) * 2, (placement,), MESH, coordinate, reducer, seed)
        return function(parts[coordinate[0] * 2 + coordinate[1]])

    results = run_ranks(run, MESH, collectives=False)
    return tuple(join([result[at] for result in results], placement, MESH) for at in range(2))


@pytest.mark.parametrize("placement", [("S0", "R"), ("R", "S1"), ("S1", "S2"), ("S2", "S2"), ("S0", "S2")])
def test_dropout_draws_the_same_numbers_under_any_sharding(placement):
    tensor = torch.randn(8, 12, 16)
    whole, mask = dropout_on(("R", "R"), tensor)
    output, sharded_mask = dropout_on(placement, tensor)
    assert torch.equal(mask, sharded_mask)
    assert torch.equal(whole, output)


@pytest.mark.slow
@pytest.mark.parametrize("placement", [("R", "R"), ("S0", "R"), ("S1", "S2"), ("S2", "S2")])
def test_masks_in_one_generated_kernel_are_those_in_chunks(placement, monkeypatch):
    tensor = torch.randn(8, 12, 16)
    output, mask = dropout_on(placement, tensor)
    monkeypatch.setattr(counter_random, "GENERATED_FOR", ("cpu",))
    counter_random._generated.cache_clear()
    torch.compiler.reset()
    metrics.reset()
    found, found_mask = dropout_on(placement, tensor)
    assert torch.equal(found_mask, mask)
    assert torch.equal(found, output)
    assert metrics.generated_kernel_count == 1
    again, _ = dropout_on(placement, torch.cat([tensor, tensor]))  # of other sizes, by the same code
    assert again.shape == (16, 12, 16)
    assert metrics.generated_kernel_count == 1


def test_dropout_is_dropout():
    tensor = torch.randn(64, 64, 160)
    output, mask = dropout_on(("S0", "R"), tensor)
    assert abs(mask.float().mean().item() - 0.7) < 0.005
    assert mask.float().mean((0, 1)).std() < 0.02
    torch.testing.assert_close(output, tensor * mask / 0.7)
    assert not torch.equal(mask, dropout_on(("S0", "R"), tensor, seed=8)[1])
    assert not torch.equal(mask, dropout_on(("S0", "R"), tensor, stream=4)[1])
    assert torch.equal(mask, dropout_on(("S0", "R"), tensor)[1])
    assert not dropout_on(("S0", "R"), tensor, probability=1.0)[0].any()


def test_a_seed_tensor_is_read_at_every_execution():
    seed, tensor = torch.tensor(7), torch.ones(8, 16)
    value, mask = Value(0, "x", spec(8, 16), ValueRole.ACTIVATION), spec(8, 16, dtype="bool")
    operator = Operator(0, "d", "d", "aten.native_dropout.default", "", Phase.FORWARD, (0,), (0, 1), False, True, 0)
    graph = OperatorGraph((value, Value(1, "m", mask, ValueRole.ACTIVATION)), (operator,), (0,), ())
    call = call_of(aten.native_dropout.default, Slot(0), 0.5, True)
    function = build_local(call, operator, graph, (("R",),) * 2, (("R",),), (1,), (0,), None, seed)
    first = function(tensor)[1]
    assert torch.equal(first, function(tensor)[1])
    fixed = build_local(call, operator, graph, (("R",),) * 2, (("R",),), (1,), (0,), None, 7)
    assert torch.equal(first, fixed(tensor)[1])
    seed.fill_(8)
    assert not torch.equal(first, function(tensor)[1])


@pytest.mark.parametrize(
    ("target", "arguments"),
    [
        (aten.bernoulli.p, (Slot(0), 0.4)),
        (aten.bernoulli.default, (Slot(0),)),
        (aten.rand_like.default, (Slot(0),)),
        (aten.randn_like.default, (Slot(0),)),
        (aten.randint_like.low_dtype, (Slot(0), 2, 9)),
    ],
)
def test_random_operators_are_exact_under_sharding_and_have_their_distribution(target, arguments):
    tensor = torch.full((64, 96), 0.4)
    call, whole = call_of(target, *arguments), (spec(64, 96),)

    def run_on(placement):
        parts = split(tensor, placement, MESH)

        def run(coordinate, reducer):
            local = [parts[coordinate[0] * 2 + coordinate[1]]]
            return run_local(call, whole, local, whole, (placement,), (placement,), MESH, coordinate, reducer)

        return join([result for (result,) in run_ranks(run, MESH, collectives=False)], placement, MESH)

    drawn = run_on(("R", "R"))
    assert torch.equal(drawn, run_on(("S1", "S0")))
    mean, deviation = {
        "bernoulli": (0.4, 0.49),
        "rand_like": (0.5, 0.289),
        "randn_like": (0.0, 1.0),
        "randint_like": (5.0, 2.0),
    }[target._schema.name.removeprefix("aten::")]
    assert abs(drawn.mean().item() - mean) < 0.05 * max(mean, 1)
    assert abs(drawn.std().item() - deviation) < 0.05 * max(deviation, 1)


def test_a_random_operator_without_a_counter_form_is_refused():
    call = call_of(aten.multinomial.default, Slot(0), 2, True)
    with pytest.raises(UnsupportedOperatorError, match=r"aten\.multinomial\.default draws random numbers"):
        run_local(
            call, (spec(4, 2, dtype="int64"),), [torch.rand(4, 8)], (spec(4, 8),), (("R",),), (("R",),), (1,), (0,)
        )


def test_plain_operators_keep_their_overload_and_get_local_sizes():
    step = traced_step("gpt2")
    rules, _ = axis_rules(step, 2)
    plain = 0
    for operator, call, inputs, outputs in distinct_operators(step):
        for strategy in compose(operator, step.graph, (rules[operator.index],) * 2, MESH):
            if strategy.collectives:
                continue
            function = build_local(call, operator, step.graph, strategy.outputs, strategy.inputs, MESH, (1, 0), None)
            if isinstance(function, LocalOperator):
                metas = [
                    torch.empty(
                        local_shape(given.shape, placed, MESH), dtype=getattr(torch, given.dtype), device="meta"
                    )
                    for given, placed in zip(inputs, strategy.inputs, strict=True)
                ]
                args, kwargs = function.call.arguments(metas, torch.device("meta"))
                result = function.call.target(*args, **kwargs)
                first = result[0] if isinstance(result, (tuple, list)) else result
                assert tuple(first.shape) == local_shape(outputs[0].shape, strategy.outputs[0], MESH)
                plain += 1
    assert plain > 500


def test_sums_over_a_sharded_vocabulary_are_as_precise_as_torch():
    scores, labels = torch.randn(16, 512).bfloat16() * 4, torch.randint(512, (16,))
    call, whole = call_of(aten._log_softmax.default, Slot(0), 1, False), (spec(16, 512, dtype="bfloat16"),)
    placement = ("S1", "S1")
    parts = split(scores, placement, MESH)

    def run(coordinate, reducer):
        local = [parts[coordinate[0] * 2 + coordinate[1]]]
        return run_local(call, whole, local, whole, (placement,), (placement,), MESH, coordinate, reducer)

    found = join([result for (result,) in run_ranks(run, MESH, collectives=True)], placement, MESH)
    exact = scores.double().log_softmax(1).gather(1, labels[:, None])
    torch_error = (scores.log_softmax(1).gather(1, labels[:, None]).double() - exact).abs().max()
    assert (found.gather(1, labels[:, None]).double() - exact).abs().max() <= 1.01 * torch_error


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_a_loss_in_16_bits_is_added_up_in_32(dtype):
    """3,001 rows with losses of 40: their sum ends beyond float16, and bfloat16 counts only every sixteenth of them."""
    rows, mesh, whole = 6002, (2,), (spec(6002, 4, dtype=dtype), spec(6002, dtype="int64"))
    scores, labels = torch.full((rows, 4), -40.0, dtype=getattr(torch, dtype)), torch.zeros(rows, dtype=torch.int64)
    labels[::2] = -100
    call = call_of(aten.nll_loss_forward.default, Slot(0), Slot(1), None, 1, -100)
    placed_out = (("Psum",), ("R",))
    for inputs in ((("S0",), ("S0",)), (("S1",), ("R",))):
        parts = [split(tensor, placed, mesh) for tensor, placed in zip((scores, labels), inputs, strict=True)]

        def run(coordinate, reducer, parts=parts, inputs=inputs):
            local = [part[coordinate[0]] for part in parts]
            outputs = (spec(dtype=dtype), spec(dtype=dtype))
            return run_local(call, outputs, local, whole, placed_out, inputs, mesh, coordinate, reducer)

        losses = [result[0] for result in run_ranks(run, mesh, collectives=True)]
        assert sum(losses).item() == pytest.approx(40.0, rel=1e-2)


def test_a_mean_over_uneven_labels_counts_every_label_once():
    scores, labels = torch.randn(8, 6), torch.tensor([0, -100, -100, -100, 1, 2, 3, -100])
    call = call_of(aten.nll_loss_forward.default, Slot(0), Slot(1), None, 1, -100)
    specs, outputs = (spec(8, 6), spec(8, dtype="int64")), (spec(), spec())
    expected = aten.nll_loss_forward.default(scores, labels, None, 1, -100)
    for inputs in ((("S0", "S0"), ("S0", "S0")), (("S0", "S1"), ("S0", "R")), (("S1", "S0"), ("R", "S0"))):
        parts = [split(tensor, placed, MESH) for tensor, placed in zip((scores, labels), inputs, strict=True)]
        placed_out = (("Psum", "Psum"), ("R", "R"))

        def run(coordinate, reducer, parts=parts, inputs=inputs, placed_out=placed_out):
            local = [part[coordinate[0] * 2 + coordinate[1]] for part in parts]
            return run_local(call, outputs, local, specs, placed_out, inputs, MESH, coordinate, reducer)

        results = run_ranks(run, MESH, collectives=True)
        for at in range(2):
            compare(join([result[at] for result in results], placed_out[at], MESH), expected[at])


@pytest.mark.parametrize(
    ("key_heads", "options"),
    [
        (4, {}),
        (2, {"is_causal": True}),
        (4, {"scale": 0.3}),
        (2, {"attn_mask": (3, 1, 300, 40)}),
        (4, {"attn_mask": (300, 40)}),
    ],
)
def test_blockwise_attention_equals_the_cpu_kernel(key_heads, options):
    query, key, value = torch.randn(3, 4, 300, 8), torch.randn(3, key_heads, 40, 8), torch.randn(3, key_heads, 40, 8)
    forward = aten._scaled_dot_product_flash_attention_for_cpu.default
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    keywords = {name: option for name, option in options.items() if name == "scale"}
    causal = bool(options.get("is_causal"))
    mask = [torch.randn(options["attn_mask"])] if "attn_mask" in options else []

    def check(target, build, tensors):
        slots = [Slot(at) for at in range(len(tensors))]
        masked = {"attn_mask": slots[-1]} if mask else {}
        call = call_of(target, *slots[: len(slots) - len(mask)], 0.0, causal, **keywords, **masked)
        context = LocalContext(call, tuple(map(spec_of, tensors)), (), (), (), (1,), (0,))
        args, kwargs = call.arguments(tensors)
        expected, found = target(*args, **kwargs), build(context)(*tensors)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
        return expected

    output, logsumexp = check(forward, blockwise_forward, [query, key, value, *mask])
    gradient = torch.randn_like(output)
    check(backward, blockwise_backward, [gradient, query, key, value, output, logsumexp, *mask])


def spec_of(tensor) -> TensorSpec:
    return spec(*tensor.shape)


def test_as_strided_counts_in_the_captured_layout():
    whole = TensorSpec((4, 6), (1, 4), "float32")
    call = call_of(aten.as_strided.default, Slot(0), [2, 2], [4, 1], 1)
    tensor = torch.arange(24.0).view(6, 4).t()
    expected = tensor.as_strided([2, 2], [4, 1], 1)
    for layout in (tensor, tensor.contiguous()):
        (found,) = run_local(call, (spec(2, 2),), [layout], (whole,), (("R",),), (("R",),), (1,), (0,))
        assert torch.equal(found, expected)


def test_a_failing_rank_does_not_leave_the_others_waiting():
    def run(coordinate, reducer):
        if coordinate == (1, 0):
            raise IndexError("rank (1, 0)")
        return (reducer.all_reduce(torch.ones(2), "sum", 0),)

    started, before = time.perf_counter(), threading.active_count()
    with pytest.raises(IndexError, match=r"rank \(1, 0\)"):
        run_ranks(run, MESH, collectives=True)
    assert time.perf_counter() - started < 5
    assert threading.active_count() == before


def test_an_undeclared_collective_is_an_error():
    with pytest.raises(UnsupportedOperatorError, match="needs an all-reduce on mesh axis 0"):
        run_local(
            call_of(aten._log_softmax.default, Slot(0), 1, False),
            (spec(4, 8),), [torch.randn(4, 4)], (spec(4, 8),), (("S1",),), (("S1",),), (2,), (0,),
        )  # fmt: skip
    with pytest.raises(MismatchError, match="not declared"):
        run_ranks(lambda coordinate, reducer: (reducer.all_reduce(torch.ones(1), "sum", 0),), (2,), collectives=False)
