"""Tensors between modules: those of the operator graph, each once, marked by what happens to them on their way."""

from __future__ import annotations

import pytest
from support.steps.opened_plans import KINDS, opened_plan

from planner.graph.operator_graph import Phase, ValueRole
from planner.replay.memory import LocalBytes
from planner.schedule.instructions import Compute, Prefetch, Reshard
from planner.view.flows import GIVEN, Part, Way, flows_of
from planner.view.modules import module_tree


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", list(Phase))
def test_flows_of_a_phase_are_the_edges_of_the_operator_graph_between_modules(kind, phase):
    opened = opened_plan(kind)
    found = flows_of(opened, module_tree(opened))
    part = Part.BACKWARD if phase is Phase.BACKWARD else Part.FORWARD
    drawn = {
        (module_of(found, flow.source), module_of(found, reader))
        for flow in found.nbytes
        if flow.part is part
        for reader in flow.readers
    }
    values = opened.graph.values
    expected = {
        (source_of(opened.graph, values[value]), operator.module_path)
        for operator in opened.graph.operators
        if operator.phase is phase
        for value in operator.inputs
        if values[value].producer is None or opened.graph.operators[values[value].producer].phase is phase
    }
    between = {(one, other) for one, other in expected if one != other}
    assert {(one, other) for one, other in drawn if one != other} == between
    assert between


def module_of(found, run):
    return None if run == GIVEN else found.paths[found.runs[run].module]


def source_of(graph, value):
    if value.producer is not None:
        return graph.operators[value.producer].module_path
    return value.name.rpartition(".")[0] if value.role in (ValueRole.PARAMETER, ValueRole.BUFFER) else None


def test_bytes_are_those_on_one_device_and_each_tensor_counts_once():
    opened = opened_plan("serial", mesh=(2, 2))
    found = flows_of(opened, module_tree(opened))
    source = "transformer.ln_f"
    first = {e.operator: e for e in reversed(opened.schedule.instructions) if isinstance(e, Compute)}
    read = {
        buffer
        for entry in first.values()
        if opened.graph.operators[entry.operator].phase is Phase.FORWARD
        for buffer in entry.inputs
        if source_of(opened.graph, value_of(opened, buffer)) == source
        and opened.graph.operators[entry.operator].module_path != source
    }
    local, buffers = LocalBytes(opened.graph, opened.session.mesh), opened.schedule.buffers
    mine = [f for f in found.nbytes if f.part is Part.FORWARD and module_of(found, f.source) == source]
    assert sum(found.nbytes[f] for f in mine) == sum(local(buffers[b].value, buffers[b].placement) for b in read)
    assert sum(found.counts[f] for f in mine) == len(read) > 0


def value_of(opened, buffer):
    return opened.graph.values[opened.schedule.buffers[buffer].value]


@pytest.mark.parametrize(("kind", "way"), [("serial", Way.RESHARDED), ("offloaded", Way.BY_THE_HOST)])
def test_what_comes_resharded_or_from_the_host_is_marked(kind, way):
    opened = opened_plan(kind)
    found = flows_of(opened, module_tree(opened))
    makes = Reshard if way is Way.RESHARDED else Prefetch
    made = {entry.target for entry in opened.schedule.instructions if isinstance(entry, makes)}
    read = {buffer for entry in opened.schedule.instructions if isinstance(entry, Compute) for buffer in entry.inputs}
    assert made & read
    assert sum(count for flow, count in found.counts.items() if way in flow.way) > 0
    assert sum(count for flow, count in found.counts.items() if not flow.way) > 0


def test_a_module_that_runs_around_another_has_two_runs():
    opened = opened_plan("serial")
    found = flows_of(opened, module_tree(opened))
    block = found.paths.index("transformer.h.0")
    runs = [run for run in found.runs if run.module == block and run.phase == 0]
    assert len(runs) >= 2, "the residual sums stand before and after the feed-forward network"
    inner = found.paths.index("transformer.h.0.mlp.c_fc")
    (between,) = [run.first for run in found.runs if run.module == inner and run.phase == 0]
    assert runs[0].first < between < runs[-1].first
