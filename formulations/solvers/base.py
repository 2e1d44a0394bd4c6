"""The protocol that every solver follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from formulations.problem import StrategyProblem
from formulations.solution import Claim, Progress, SolveOptions

if TYPE_CHECKING:
    from formulations.solvers.worker import SolverPool

ReportProgress = Callable[[Progress], None]
"""Called by a solver with its best incumbent and bound so far; cheap, and may be ignored."""

ReportIncumbent = Callable[[tuple[int, ...]], None]
"""Called by a solver with every better assignment, so that a killed worker still leaves it."""

AskOthers = Callable[[], tuple[int, ...] | None]
"""Returns an assignment of the problem that was found elsewhere and that nobody was told of yet, or None."""


class Solver(Protocol):
    """A function that solves a canonical problem; one per file, named in the registry."""

    def __call__(
        self,
        problem: StrategyProblem,
        options: SolveOptions,
        report: ReportProgress,
        incumbent: ReportIncumbent,
    ) -> Claim:
        """Solve within ``options.time_limit`` seconds and return what is claimed."""
        ...


@dataclass(frozen=True, slots=True)
class Desk:
    """What a solver that lets others work for it finds on its desk.

    Parameters
    ----------
    workers
        Processes to run others in.
    report
        As for every solver.
    incumbent
        Takes every better assignment and who found it.
    spend
        Takes processor seconds, and the peak of resident bytes of all processes together.
    should_stop
        Asked now and then; where it says yes, the solve ends as by Ctrl-C.
    from_others
        Asked now and then for what was found elsewhere.
    """

    workers: SolverPool
    report: ReportProgress
    incumbent: Callable[[tuple[int, ...], str], None]
    spend: Callable[[float, int], None]
    should_stop: Callable[[], bool] = lambda: False
    from_others: AskOthers = lambda: None


class Coordinator(Protocol):
    """A solver that lets others work for it; runs in the caller's process and thread, and must not hang."""

    def __call__(self, problem: StrategyProblem, options: SolveOptions, desk: Desk) -> Claim:
        """Solve within ``options.time_limit`` seconds and return what is claimed."""
        ...
