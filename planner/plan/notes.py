"""Notes of a plan: operators that could not be sharded, by name and count, and their time in the plan."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from planner.common.units import format_seconds
from planner.graph.operator_graph import OperatorGraph, ValueRole
from planner.machine.cluster import ClusterSpec
from planner.machine.known_costs import CostSource
from planner.plan.format import COSTS
from planner.replay.checker import ReplayReport, StepCosts
from planner.schedule.instructions import Compute, Schedule, buckets
from planner.strategies.sharding_rules import RuleReport

_NAMED = 3
"""Kinds of operators that a note names."""

INTERRUPTED = "interrupted: the search ended before its time limit, so its gap may be wider for that"
"""Note of a plan whose search was ended by Ctrl-C."""


def cost_note(seconds: Mapping[CostSource, float]) -> str:
    """A line that says how the costs of a step are known, by seconds of each."""
    spent = [f"{format_seconds(seconds[source])} {source}" for source in CostSource if seconds.get(source)]
    return f"{COSTS}{', '.join(spent) or 'none'}"


def costs_in(notes: Sequence[str]) -> str:
    """What :func:`cost_note` says among the notes of a plan; empty where it is not there."""
    return next((note.removeprefix(COSTS) for note in notes if note.startswith(COSTS)), "")


def sharing_notes(cluster: ClusterSpec, mesh: Sequence[int]) -> tuple[str, ...]:
    """A note where a machine was measured with fewer processes than a mesh has, which share what these reached."""
    ranks = prod(mesh)
    if cluster.measured is None or ranks <= cluster.measured.ranks:
        return ()
    return (
        f"{cluster.name} was measured with {cluster.measured.ranks} processes at once and the mesh has {ranks}, which "
        f"are taken to share its rates: `meshwright calibrate --ranks {ranks}` measures them",
    )


def overlap_notes(schedule: Schedule, report: ReplayReport) -> tuple[str, ...]:
    """A note on the communication that runs beside the computation, where there is some."""
    if not report.overlapped_quanta:
        return ()
    beside, exposed = (
        format_seconds((quanta or 0) * 1e-9) for quanta in (report.overlapped_quanta, report.exposed_quanta)
    )
    joined = buckets(schedule.instructions)
    shared = f"; {sum(map(len, joined))} transfers share {len(joined)} of them" if joined else ""
    return (f"collectives beside the computation: {beside}; it waits {exposed} for them{shared}",)


@dataclass(frozen=True, slots=True)
class Undivided:
    """Operators of one target with a dimension that a mesh axis does not divide: how many, and their time in a plan."""

    target: str
    count: int
    seconds: float


def undivided_operators(
    graph: OperatorGraph, schedule: Schedule, report: RuleReport, costs: StepCosts
) -> tuple[Undivided, ...]:
    """Operators that lost a layout because a dimension does not divide, those that take longest first.

    Parameters
    ----------
    graph, schedule, report, costs
        As for :func:`planning_notes`. Their time bounds what dividing could save; those that take none are left out.
    """
    spent: dict[str, int] = defaultdict(int)
    for instruction in schedule.instructions:
        if isinstance(instruction, Compute) and instruction.operator in report.undivided:
            operator = graph.operators[instruction.operator]
            if not operator.is_view:
                outputs = tuple(None if b is None else schedule.buffers[b].placement for b in instruction.outputs)
                inputs = tuple(schedule.buffers[b].placement for b in instruction.inputs)
                spent[operator.target] += costs.compute_quanta(instruction.operator, outputs, inputs)
    found = (
        Undivided(target, count, spent[target] * 1e-9) for target, count in report.not_dividing.items() if spent[target]
    )
    return tuple(sorted(found, key=lambda entry: (-entry.seconds, entry.target)))


def planning_notes(graph: OperatorGraph, schedule: Schedule, report: RuleReport, costs: StepCosts) -> tuple[str, ...]:
    """Notes on the operators that could not be sharded.

    Parameters
    ----------
    graph, schedule
        The traced step and its plan.
    report
        Operators without rules on the axes of the mesh.
    costs
        Prices of instructions.

    Returns
    -------
    tuple of str
        One line per kind of operator without a rule, one for all with a dimension that does not divide, and the notes
        of the trace.
    """
    lines = [
        f"{count} x {target}: no sharding rule, runs replicated"
        for target, count in sorted(report.without_rule.items())
    ]
    found = undivided_operators(graph, schedule, report, costs)
    if found:
        longest = ", ".join(f"{entry.target} {format_seconds(entry.seconds)}" for entry in found[:_NAMED])
        more = f" and {len(found) - _NAMED} more kinds, which explain lists" if len(found) > _NAMED else ""
        lines.append(
            f"{sum(entry.count for entry in found)} operators: a dimension does not divide by a mesh axis and is not "
            f"sharded on it; they take {format_seconds(sum(entry.seconds for entry in found))} of the step: "
            f"{longest}{more}{_other_batch(graph, schedule)}"
        )
    return (*lines, *graph.notes)


def _other_batch(graph: OperatorGraph, schedule: Schedule) -> str:
    """Which batch would divide, where that of the inputs does not."""
    specs = [graph.values[value].spec for value in graph.inputs if graph.values[value].role is ValueRole.INPUT]
    rows = {spec.shape[0] for spec in specs if spec.shape}
    if len(rows) != 1:
        return ""
    (batch,), ranks = rows, prod(schedule.mesh)
    if not any(batch % size for size in schedule.mesh):
        return ""
    return f". The inputs have {batch} rows: a batch that is a multiple of {ranks} divides by every mesh axis"
