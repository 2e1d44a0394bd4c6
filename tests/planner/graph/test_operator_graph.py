"""The operator graph as a graph of networkx: its counts, its sums, and that other programs can read it."""

from __future__ import annotations

import ast
import json

import networkx as nx
import pytest
from support.steps.traced_steps import ALL_STEPS, traced_step

from planner.graph.operator_graph import OperatorGraph, module_prefix

DEPTHS = (0, 1, 2, 3, 20)


def read_results(graph: OperatorGraph) -> set[tuple[int, int]]:
    """(Value, reader) of every value that an operator makes."""
    return {
        (value, operator.index)
        for operator in graph.operators
        for value in operator.inputs
        if graph.values[value].producer is not None
    }


def sums(exported: nx.MultiDiGraph) -> dict[str, int]:
    return {name: sum(dict(exported.nodes(name)).values()) for name in ("operators", "flops", "bytes")}


@pytest.mark.slow_cases("t5")
@pytest.mark.parametrize("name", ALL_STEPS)
def test_nodes_are_operators_and_edges_are_values(name):
    graph = traced_step(name).graph
    exported = graph.to_networkx()
    assert list(exported) == [operator.identity for operator in graph.operators]
    assert nx.is_directed_acyclic_graph(exported)
    edges = {(data["value"], target) for _, target, data in exported.edges(data=True)}
    identities = [operator.identity for operator in graph.operators]
    assert edges == {(graph.values[value].name, identities[reader]) for value, reader in read_results(graph)}
    assert exported.number_of_edges() == len(read_results(graph))
    for operator in graph.operators:
        node = exported.nodes[operator.identity]
        assert (node["index"], node["phase"], node["target"]) == (operator.index, operator.phase, operator.target)
        assert (node["flops"], node["source"], node["operators"]) == (operator.flops, operator.source, 1)
        assert node["module_path"] == (operator.module_path or "(root)")
        assert operator.is_view == node["is_view"]
        assert not (operator.is_view and node["bytes"])
    by_name = {value.name: value for value in graph.values}
    for source, target, key, data in exported.edges(keys=True, data=True):
        value = by_name[key]
        assert identities[value.producer] == source != target
        assert (ast.literal_eval(data["shape"]), data["dtype"]) == (value.spec.shape, value.spec.dtype)
        assert data["bytes"] == value.spec.nbytes


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("name", ALL_STEPS)
def test_folding_preserves_sums_and_what_crosses_modules(name, depth):
    graph = traced_step(name).graph
    folded = graph.to_networkx(depth)
    assert sums(folded) == sums(graph.to_networkx())
    homes = [f"{module_prefix(op.module_path, depth)}/{op.phase}" for op in graph.operators]
    assert list(folded) == list(dict.fromkeys(homes))
    crossing = {
        (homes[graph.values[value].producer], homes[reader], graph.values[value].name)
        for value, reader in read_results(graph)
        if homes[graph.values[value].producer] != homes[reader]
    }
    assert set(folded.edges(keys=True)) == crossing
    first = [data["index"] for _, data in folded.nodes(data=True)]
    assert first == sorted(first)


def test_depth_zero_is_forward_and_backward():
    folded = traced_step("gpt2").graph.to_networkx(0)
    assert list(folded) == ["(root)/forward", "(root)/backward"]
    assert set(nx.DiGraph(folded).edges) == {("(root)/forward", "(root)/backward")}


def test_blocks_of_a_transformer_are_a_chain():
    folded = traced_step("gpt2").graph.to_networkx(3)
    assert folded.has_edge("transformer.h.0/forward", "transformer.h.1/forward")
    assert folded.has_edge("transformer.h.1/backward", "transformer.h.0/backward")
    assert folded.nodes["transformer.h.0/forward"]["flops"] == folded.nodes["transformer.h.1/forward"]["flops"] > 0


def test_a_negative_depth_is_refused():
    with pytest.raises(ValueError, match="depth is -1: give 0 or more"):
        traced_step("conv_net").graph.to_networkx(-1)


@pytest.mark.parametrize("depth", [None, 2])
def test_other_programs_read_the_graph(tmp_path, depth):
    exported = traced_step("llama").graph.to_networkx(depth)
    data = [*dict(exported.nodes(data=True)).values(), *(data for *_, data in exported.edges(data=True))]
    assert {type(value) for attributes in data for value in attributes.values()} <= {int, str, bool}
    text = json.dumps(nx.node_link_data(exported))
    again = nx.node_link_graph(json.loads(text))
    assert nx.utils.graphs_equal(exported, again)
    nx.write_graphml(exported, tmp_path / "step.graphml")
    read = nx.read_graphml(tmp_path / "step.graphml", force_multigraph=True)
    assert set(read.nodes) == set(exported.nodes)
    assert sorted(read.edges(data="value")) == sorted(exported.edges(data="value"))
    assert sums(read) == sums(exported)
