"""What tensor parallelism divides by structure, beside the verified sharding rules of the same operators."""

from __future__ import annotations

import pytest
from support.layer_models import captured_batch

from planner.layer_regions import module_regions
from planner.layer_split import divided_module
from planner.placement import is_partial, is_shard
from planner.sharding_rules import axis_rules
from planner.view_chains import view_chains


def lawful(rule, graph, operator, small, partial):
    """Whether a rule shards exactly the divided tensors; a bias beside a pending sum may be whole or a part of it."""
    beside_sum = [partial and len(graph.values[value].spec.shape) == 1 for value in operator.inputs]
    given = all(
        free or is_shard(word) == (value in small)
        for value, word, free in zip(operator.inputs, rule.inputs, beside_sum, strict=True)
    )
    wanted = is_partial if partial else is_shard
    return given and all(word is None or wanted(word) for word in rule.outputs)


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_verified_rules_allow_every_division(name):
    captured = captured_batch(name, 4)
    graph = captured.graph
    rules, _ = axis_rules(captured, 2)
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
    captured = captured_batch("gpt2", 4)
    graph, bases = captured.graph, tuple(chain.base for chain in view_chains(captured.graph))
    attention = next(region for region in module_regions(graph) if region.role == "attention")
    divided = divided_module(graph, attention, bases)
    names = {graph.values[value].name.removeprefix("transformer.h.0.attn.") for value in divided.parameters}
    assert divided.divisor == 4
    assert names == {"c_attn.weight", "c_attn.bias", "c_proj.weight"}  # the bias behind the sum is whole


def test_ends_of_a_model_are_not_divided():
    captured = captured_batch("gpt2", 4)
    bases = tuple(chain.base for chain in view_chains(captured.graph))
    regions = module_regions(captured.graph)
    for region in (regions[0], regions[-1]):
        divided = divided_module(captured.graph, region, bases)
        assert divided.divisor == 0
        assert not divided.operators
