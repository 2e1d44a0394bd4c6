"""Tensors that pass from module to module, for a graph that folds and unfolds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum, IntFlag
from typing import Any

from planner.graph.operator_graph import OperatorGraph, Phase, Value, ValueRole
from planner.replay.memory import LocalBytes
from planner.schedule.instructions import Compute, Offload, Prefetch, Reshard
from planner.view.modules import Figures, Module
from planner.view.naming import module_of_value
from planner.view.opened import OpenedPlan

GIVEN = -1
"""Stands for the run that makes what the step is given: inputs and tangents."""


class Part(IntEnum):
    """Part of the step in which a tensor is read."""

    FORWARD = 0
    KEPT = 1
    BACKWARD = 2


class Way(IntFlag):
    """What happens to a tensor on its way to a reader."""

    RESHARDED = 1
    BY_THE_HOST = 2


@dataclass(frozen=True, slots=True)
class Run:
    """Operators of one module and phase, first executions, that no operator of another module interrupts.

    Parameters
    ----------
    module
        Position of the module.
    phase
        0 for forward, 1 for backward.
    first
        Instruction that it begins with; -1 where the module only has a parameter that others read.
    """

    module: int
    phase: int
    first: int


@dataclass(frozen=True, slots=True)
class Flow:
    """Tensors that one run makes and the same others read; a tensor under two placements is two.

    Parameters
    ----------
    source
        Position of the run, or :data:`GIVEN`.
    readers
        Positions of the runs that read them, that of the source left out.
    part
        Forward, what forward makes and backward or recomputation reads, or backward.
    way
        What happens to them on their way.
    """

    source: int
    readers: frozenset[int]
    part: Part
    way: Way


@dataclass(slots=True)
class Flows:
    """The flows of a plan.

    Parameters
    ----------
    paths
        Paths of the modules in the order of the tree.
    runs
        Runs of the modules, in order of execution in each phase.
    nbytes, counts
        Bytes on one device and number of tensors of each flow.
    """

    paths: list[str]
    runs: list[Run] = field(default_factory=list)
    nbytes: Counter[Flow] = field(default_factory=Counter)
    counts: Counter[Flow] = field(default_factory=Counter)

    def document(self, tree: Module) -> dict[str, Any]:
        """What the page's script draws."""
        return {
            "paths": self.paths,
            "runs": [[run.module, run.phase, run.first] for run in self.runs],
            "flows": [
                [flow.source, sorted(flow.readers), flow.part, flow.way, nbytes, self.counts[flow]]
                for flow, nbytes in self.nbytes.items()
            ],
            "figures": [[_numbers(module.own), _numbers(module.all)] for module in tree.walk()],
        }


def flows_of(opened: OpenedPlan, tree: Module) -> Flows:
    """Tensors that pass between the modules of a plan.

    Parameters
    ----------
    opened
        The plan.
    tree
        Its modules.
    """
    graph, schedule = opened.graph, opened.schedule
    found = Flows([module.path for module in tree.walk()])
    run_of = _runs(opened, found)
    ways: dict[int, Way] = {}
    ran: set[int] = set()
    readers: dict[tuple[int, Part], set[int]] = {}
    for entry in schedule.instructions:
        match entry:
            case Reshard(source, target):
                ways[target] = ways.get(source, Way(0)) | Way.RESHARDED
            case Offload(source, target) | Prefetch(source, target):
                ways[target] = ways.get(source, Way(0)) | Way.BY_THE_HOST
            case Compute(operator, inputs):
                for buffer in inputs:
                    phase = graph.operators[operator].phase
                    part = _part(graph, schedule.buffers[buffer].value, phase, again=operator in ran)
                    readers.setdefault((buffer, part), set()).add(run_of[operator])
                ran.add(operator)
    local = LocalBytes(graph, opened.session.mesh)
    for (buffer, part), reading in readers.items():
        value, placement = schedule.buffers[buffer].value, schedule.buffers[buffer].placement
        source = _source(graph, graph.values[value], found, run_of)
        others = frozenset(reading - {source})
        if others:
            flow = Flow(source, others, part, ways.get(buffer, Way(0)))
            found.nbytes[flow] += local(value, placement)
            found.counts[flow] += 1
    return found


def _runs(opened: OpenedPlan, found: Flows) -> dict[int, int]:
    """Find the runs, and the run of each operator."""
    number = {path: at for at, path in enumerate(found.paths)}
    last: dict[Phase, int] = {}
    run_of: dict[int, int] = {}
    for at, entry in enumerate(opened.schedule.instructions):
        if isinstance(entry, Compute) and entry.operator not in run_of:
            described = opened.graph.operators[entry.operator]
            module, before = number[described.module_path], last.get(described.phase)
            if before is None or found.runs[before].module != module:
                last[described.phase] = len(found.runs)
                found.runs.append(Run(module, int(described.phase is Phase.BACKWARD), at))
            run_of[entry.operator] = last[described.phase]
    return run_of


def _source(graph: OperatorGraph, value: Value, found: Flows, run_of: Mapping[int, int]) -> int:
    """Run that makes a value; of a parameter or module buffer the first forward run of its module."""
    if value.producer is not None:
        return run_of[value.producer]
    if value.role in (ValueRole.INPUT, ValueRole.TANGENT):
        return GIVEN
    module = found.paths.index(module_of_value(graph, value))
    for at, run in enumerate(found.runs):
        if run.module == module and run.phase == 0:
            return at
    found.runs.append(Run(module, 0, -1))
    return len(found.runs) - 1


def _part(graph: OperatorGraph, value: int, phase: Phase, *, again: bool) -> Part:
    producer = graph.values[value].producer
    made = phase if producer is None else graph.operators[producer].phase
    if made is Phase.BACKWARD:
        return Part.BACKWARD
    if again or phase is Phase.BACKWARD:
        return Part.KEPT if producer is not None or again else Part.BACKWARD
    return Part.FORWARD


def _numbers(figures: Figures) -> list[int]:
    kinds = figures.placement_kinds
    return [
        figures.total_ns,
        figures.peak_bytes,
        *(kinds[kind] for kind in ("sharded", "replicated", "partial")),
        figures.reshards,
        figures.recomputed,
        figures.offloaded,
    ]
