"""What is known of plans of one step: decisions and bounds, and for which other limits and pins they hold.

A decision is one of every problem that contains it and whose limit it is within. A bound holds for every problem whose
plans are among those of its own: with the same formulation, as many pins or more, and as much memory or less.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from formulations.problem.solution import KnownBound, SolveResult, relative_gap
from formulations.step.solving.context import NEAR_OPTIMAL, Executed
from formulations.step.training_step import StepDecision
from planner.common.units import format_bytes
from planner.plan.decision import Pin
from planner.plan.document import Plan
from planner.session.request import PlanRequest


@dataclass(frozen=True, slots=True)
class Case:
    """What plans are searched among.

    Parameters
    ----------
    formulation, host_memory
        As in :class:`planner.session.request.PlanRequest`.
    tensor_bytes
        Bytes that tensors may hold on one device.
    pins
        Decisions of the user.
    """

    formulation: str
    host_memory: int | None
    tensor_bytes: int
    pins: frozenset[Pin] = frozenset()

    @classmethod
    def of(cls, request: PlanRequest, tensor_bytes: int, pins: frozenset[Pin] = frozenset()) -> Case:
        """The case of a request."""
        return cls(request.formulation, request.host_memory, tensor_bytes, pins)

    def contains(self, other: Case) -> bool:
        """Whether all plans of another case are among these."""
        same = (self.formulation, self.host_memory) == (other.formulation, other.host_memory)
        return same and self.pins <= other.pins and self.tensor_bytes >= other.tensor_bytes


@dataclass(frozen=True, slots=True, eq=False)
class Solution:
    """A solved case.

    Parameters
    ----------
    case
        What was searched among.
    decision, executed
        The decision, its cost (quanta) and its peak (bytes).
    bound
        Below what no plan of the case costs.
    plan
        Its plan, certified and replayed.
    second
        The bound by the second method that its plan has.
    searched_seconds
        Time limit of the longest search of the case that was not interrupted, or the time of repairs where these were
        all; 0 where every search was interrupted.
    """

    case: Case
    decision: StepDecision
    executed: Executed
    bound: KnownBound | None
    plan: Plan
    second: SolveResult | None = None
    searched_seconds: float = 0.0

    def __repr__(self) -> str:
        return (
            f"<solution within {format_bytes(self.case.tensor_bytes)} under {len(self.case.pins)} pins: {self.plan!r}>"
        )

    def is_near(self, gap: float) -> bool:
        """Whether its cost is proven to be within a gap, or so near the optimum that searches end there."""
        return is_near(self.executed.cost, self.bound, gap)


def is_near(cost: int, bound: KnownBound | None, gap: float) -> bool:
    """Whether a cost is within a gap of a bound, or so near that searches end there."""
    reached = None if bound is None else relative_gap(cost, bound.value)
    return reached is not None and reached <= max(gap, NEAR_OPTIMAL)


@dataclass(slots=True)
class Knowledge:
    """Solutions so far, the newest last."""

    solutions: list[Solution] = field(default_factory=list)

    def add(self, solution: Solution) -> None:
        """Keep a solution; it takes the place of one of the same case."""
        self.solutions = [known for known in self.solutions if known.case != solution.case]
        self.solutions.append(solution)

    def of(self, case: Case) -> Solution | None:
        """The solution of a case."""
        return next((known for known in self.solutions if known.case == case), None)

    def around(self, case: Case) -> list[Solution]:
        """Solutions of cases that contain all plans of a case: their bounds hold for it."""
        return [known for known in self.solutions if known.case.contains(case)]

    def bound(self, case: Case) -> KnownBound | None:
        """The highest bound that holds for a case."""
        bounds = (known.bound for known in self.around(case))
        return max((bound for bound in bounds if bound is not None), key=lambda bound: bound.value, default=None)
