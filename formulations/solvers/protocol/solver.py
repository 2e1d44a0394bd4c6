"""The protocol that every solver follows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.problem.strategy_problem import StrategyProblem

ReportProgress = Callable[[Progress], None]
"""Called by a solver with its best incumbent and bound so far; cheap, and may be ignored."""

ReportIncumbent = Callable[[tuple[int, ...]], None]
"""Called by a solver with every better assignment, so that a killed worker still leaves it."""

AskOthers = Callable[[], tuple[int, ...] | None]
"""Returns an assignment of the problem that was found elsewhere and was not returned before, or None."""


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
