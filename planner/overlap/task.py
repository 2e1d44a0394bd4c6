"""What the search for a plan that overlaps needs of a planning session."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from formulations.step.solving.solved import SolvedStep
from formulations.step.training_step import StepDecision, StepModel
from planner.graph.operator_graph import OperatorGraph
from planner.replay.clocks import StepCosts
from planner.replay.report import ReplayReport
from planner.schedule.instructions import Schedule

Solve = Callable[[StepModel, float, float, Sequence[StepDecision]], SolvedStep]
"""Of tables, seconds, gap and known decisions."""


@dataclass(frozen=True, slots=True)
class OverlapTask:
    """A step and the means to solve, schedule and replay it.

    Parameters
    ----------
    graph, model
        The step and its tables, with the time on each link.
    axes
        Number of mesh axes.
    limit
        Bytes of tensors on one device, or None.
    costs
        Prices of instructions.
    solve
        Finds the best decision for tables, in so many seconds, from known decisions, within the memory limit.
    solve_relaxed
        The same within all memory of the device; None where that is the limit.
    contains
        Whether the formulation contains a decision: bounds hold for those alone.
    schedule, replay
        Schedule of a decision without overlap, and replay of a schedule.
    """

    graph: OperatorGraph
    model: StepModel
    axes: int
    limit: int | None
    costs: StepCosts
    solve: Solve
    solve_relaxed: Solve | None
    contains: Callable[[StepDecision], bool]
    schedule: Callable[[StepDecision], Schedule]
    replay: Callable[[Schedule], ReplayReport]


def quanta(report: ReplayReport) -> int:
    """Predicted time of a replayed schedule without violations."""
    assert report.total_quanta is not None, report.violations
    return report.total_quanta
