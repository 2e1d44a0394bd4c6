"""Our own rules reach the planner through ``register_sharding``, and leave DTensor's tables as they were."""

from __future__ import annotations

import pytest
import torch
from support.steps.traced_steps import ALL_STEPS, traced_step
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.experimental import register_sharding

from planner.graph.axis_rule import AxisRule
from planner.graph.operator_graph import TensorSpec
from planner.strategies.sharding_rules import axis_rules
from planner.strategies.traced_step import trace_step
from planner.torch_adapter.local.calls import OperatorCall, Slot
from planner.torch_adapter.local.operator_collectives import local_collectives
from planner.torch_adapter.rules import registration as rule_registration
from planner.torch_adapter.rules.dtensor_rules import dtensor_candidates
from planner.torch_adapter.rules.own_rules import RuleRequest, own_rule
from planner.torch_adapter.rules.registration import registered
from planner.torch_adapter.rules.table import candidate_rules, signature

aten = torch.ops.aten
ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default
LOG_SOFTMAX = aten._log_softmax.default


@pytest.fixture(autouse=True)
def _fresh_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))


@pytest.fixture
def users_registrations():
    """What a test registers as a user is taken out again."""
    before = tables()
    yield
    for name, entries in before.items():
        table = getattr(DTensor._op_dispatcher.sharding_propagator, name)
        table.clear()
        table.update(entries)


def tables() -> dict[str, dict]:
    propagator = DTensor._op_dispatcher.sharding_propagator
    return {name: dict(table) for name, table in vars(propagator).items() if name.startswith("op_")}


def spec(*shape: int, dtype: str = "float32") -> TensorSpec:
    return TensorSpec(shape, tuple(torch.empty(shape, device="meta").stride()), dtype)


def distinct_operators(name):
    """Call and specs of one operator per signature."""
    step, found = traced_step(name), {}
    for operator, call in zip(step.graph.operators, step.calls, strict=True):
        inputs = tuple(step.graph.values[index].spec for index in operator.inputs)
        outputs = tuple(None if index is None else step.graph.values[index].spec for index in operator.outputs)
        found[signature(call, inputs, outputs)] = call, inputs, outputs
    return found.values()


@pytest.mark.parametrize("axis_size", [2, 4])
@pytest.mark.parametrize("name", ALL_STEPS)
def test_dtensor_hands_back_every_row_that_was_registered(name, axis_size):
    """Rows whose sizes the axis does not divide too: the report counts them."""
    compared = 0
    for call, inputs, outputs in distinct_operators(name):
        rule = own_rule(call.target)
        if rule is None or not inputs:
            continue
        rows = [(("R",) * len(outputs), ("R",) * len(inputs))]
        rows += rule(RuleRequest(call, tuple(tensor.shape for tensor in inputs), axis_size))
        expected = set()
        for words_out, words_in in rows:
            made = tuple(None if tensor is None else word for word, tensor in zip(words_out, outputs, strict=True))
            expected.add(AxisRule(made, words_in, local_collectives(call, inputs, outputs, words_in)))
        with registered(call.target, rule):
            found = dtensor_candidates(call, inputs, outputs, axis_size)
        assert set(found) == expected, call.target
        compared += len(expected)
    assert compared > 50


@pytest.mark.parametrize("name", ["gpt2", "conv_net", "mixture_of_experts"])
def test_every_own_rule_is_registered_and_the_tables_are_left_as_they_were(name, monkeypatch):
    seen, before = set(), tables()

    def recording(target):
        seen.add(target)
        return register_sharding(target)

    monkeypatch.setattr(rule_registration, "register_sharding", recording)
    with_rule = set()
    for call, inputs, outputs in distinct_operators(name):
        candidate_rules(call, inputs, outputs, 2)
        if own_rule(call.target) is not None and inputs:
            with_rule.add(call.target)
    assert seen == with_rule
    assert len(seen) > 10
    assert tables() == before


def test_the_tables_are_left_as_they_were_after_an_error():
    before = tables()

    def fail():
        assert tables() != before
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"), registered(LOG_SOFTMAX, own_rule(LOG_SOFTMAX)):
        fail()
    assert tables() == before


def test_a_rule_that_does_not_reach_dtensor_is_no_silent_loss(monkeypatch):
    monkeypatch.setattr(rule_registration, "register_sharding", lambda target: lambda function: function)
    call = OperatorCall.from_template(LOG_SOFTMAX, (Slot(0), 1, False), {})
    with pytest.raises(AssertionError, match=r"_log_softmax\.default: DTensor refused"):
        candidate_rules(call, (spec(4, 8),), (spec(4, 8),), 2)


def distances():
    class Distances(nn.Module):
        def __init__(self):
            super().__init__()
            self.points = nn.Parameter(torch.randn(4, 8))

        def forward(self, hidden):
            return torch.cdist(hidden, self.points, compute_mode="donot_use_mm_for_euclid_dist").mean()

    return trace_step(Distances(), (torch.randn(4, 8),))


def test_a_users_rule_is_asked_checked_and_not_kept_on_disk(users_registrations):
    target = aten._cdist_forward.default

    def rules():
        step = distances()
        (operator,) = [operator for operator in step.graph.operators if operator.target == str(target)]
        found, report = axis_rules(step, 2)
        return {rule.inputs: rule.outputs for rule in found[operator.index]}, report

    replicated = {("R", "R"): ("R",)}
    assert rules()[0] == replicated
    before = tables()

    @register_sharding(target)
    def users(first, second, p, mode):
        return [
            ([Replicate()], [Replicate(), Replicate(), None, None]),
            ([Shard(0)], [Shard(0), Replicate(), None, None]),
            ([Shard(0)], [Replicate(), Shard(0), None, None]),
        ]

    found, report = rules()
    assert found == replicated | {("S0", "R"): ("S0",)}
    assert report.dropped == {str(target): 1}
    assert str(target) not in report.without_rule
    for name, table in tables().items():
        assert {key: entry for key, entry in table.items() if key is not target} == before[name]
    assert DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs[target].args == (users,)

    del DTensor._op_dispatcher.sharding_propagator.op_strategy_funcs[target]
    assert rules()[0] == replicated


def test_a_users_rule_of_an_operator_of_ours_stays_and_ours_are_added(users_registrations):
    @register_sharding(ATTENTION)
    def users(query, key, value, *options):
        rest = [None] * len(options)
        return [
            ([Replicate()] * 2, [Replicate()] * 3 + rest),
            ([Shard(1)] * 2, [Shard(1)] * 3 + rest),
            ([Shard(2)] * 2, [Shard(2), Replicate(), Replicate(), *rest]),
        ]

    before = tables()
    call = OperatorCall.from_template(ATTENTION, (Slot(0), Slot(1), Slot(2)), {})
    heads = spec(4, 4, 8, 8)
    found = candidate_rules(call, (heads,) * 3, (heads, spec(4, 4, 8)), 2)
    assert {rule.inputs for rule in found} == {
        ("R", "R", "R"),
        ("S0", "S0", "S0"),
        ("S1", "S1", "S1"),
        ("S2", "R", "R"),
    }
    assert tables() == before


@pytest.mark.parametrize(
    ("target", "arguments", "words"),
    [
        (aten.arange.default, (8,), {("S0",)}),
        (aten.arange.start_step, (0, 8, 0.5), set()),
        (aten.full.default, ([4, 6], 1.0), {("S0",), ("S1",)}),
        (aten.scalar_tensor.default, (1.0,), set()),
    ],
)
def test_operators_without_tensor_arguments_have_rules_too(target, arguments, words):
    call = OperatorCall.from_template(target, arguments, {})
    result = target(*arguments)
    found = candidate_rules(call, (), (spec(*result.shape, dtype=str(result.dtype).removeprefix("torch.")),), 2)
    assert {rule.outputs for rule in found} == words
    assert all(rule.inputs == () for rule in found)


def test_collectives_follow_from_the_words():
    call = OperatorCall.from_template(LOG_SOFTMAX, (Slot(0), -1, False), {})
    scores = spec(4, 8, dtype="bfloat16")
    assert local_collectives(call, (scores,), (scores,), ("S1",)) == (("all_reduce", 16),) * 2
    assert local_collectives(call, (scores,), (scores,), ("S0",)) == ()
    backward = OperatorCall.from_template(
        aten._log_softmax_backward_data.default, (Slot(0), Slot(1), -1, torch.float32), {}
    )
    assert local_collectives(backward, (spec(4, 8),) * 2, (spec(4, 8),), ("S1", "S1")) == (("all_reduce", 16),)
    labels = (spec(4, 8), spec(4, dtype="int64"))
    for reduction, expected in ((0, ()), (1, (("all_reduce", 4),)), (2, ())):
        loss = OperatorCall.from_template(aten.nll_loss_forward.default, (Slot(0), Slot(1), None, reduction, -100), {})
        assert local_collectives(loss, labels, (spec(), spec()), ("S0", "S0")) == expected
        assert local_collectives(loss, labels, (spec(), spec()), ("S1", "R")) == ()
