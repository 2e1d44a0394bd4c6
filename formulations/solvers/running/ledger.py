"""Keeps what was found and proved during a solve, and gives it the status that it has earned."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from formulations.problem.checker import CheckReport, check
from formulations.problem.solution import Progress, SolveOptions, SolveResult, Status, relative_gap
from formulations.problem.strategy_problem import StrategyProblem


class SolverContradiction(RuntimeError):
    """Two statements that cannot both be true: a bound above a feasible objective, or infeasible beside feasible."""


class Ledger:
    """Checked incumbent, best bound and history of one solve.

    Parameters
    ----------
    problem, solver, options
        What is solved, by whom, with what options.
    progress
        Called whenever the checked incumbent or the bound improves, or None.
    """

    def __init__(
        self,
        problem: StrategyProblem,
        solver: str,
        options: SolveOptions,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.problem, self.solver, self.options = problem, solver, options
        self.choices: tuple[int, ...] | None = None
        self.objective: int | None = None
        self.bound: int | None = None
        self.certified = False
        """Whether a bound in exact integers shows that nothing is feasible."""
        self.cpu_seconds = 0.0
        self.peak_rss_bytes = 0
        self._progress = progress
        self._report: CheckReport | None = None
        self._started = time.monotonic()
        self._history: list[Progress] = []
        self._notes: list[str] = []

    @property
    def seconds(self) -> float:
        """Wall time since the ledger was opened."""
        return time.monotonic() - self._started

    @property
    def remaining_seconds(self) -> float:
        """What is left of the time limit."""
        return self.options.time_limit - self.seconds

    def note(self, message: str) -> None:
        """Add to the message of the result."""
        if message:
            self._notes.append(message)

    def spend(self, cpu_seconds: float, peak_rss_bytes: int) -> None:
        """Add a worker's use of the machine."""
        self.cpu_seconds += cpu_seconds
        self.peak_rss_bytes = max(self.peak_rss_bytes, peak_rss_bytes)

    def offer(self, assignments: Iterable[tuple[int, ...]], source: str) -> bool:
        """Check assignments, the last (best) first, until one is feasible; keep it if it is better.

        Returns
        -------
        bool
            Whether one of them is feasible.
        """
        for choices in reversed(list(assignments)):
            report = check(self.problem, choices)
            if not report.ok:
                self.note(f"{source} offered an assignment that does not hold: {report.violations[0].message}")
                continue
            assert report.objective is not None
            if self.objective is None or report.objective < self.objective:
                self.choices, self.objective, self._report = tuple(choices), report.objective, report
                self._record(source, self.choices)
            return True
        return False

    def raise_bound(self, bound: int | None, source: str) -> None:
        """Keep a lower bound if it is better."""
        if bound is not None and (self.bound is None or bound > self.bound):
            self.bound = int(bound)
            self._record(source)

    def report(self, progress: Progress) -> None:
        """Take the bound from a solver's progress; its incumbent counts only once checked."""
        self.raise_bound(progress.bound, progress.source)

    def _record(self, source: str, choices: tuple[int, ...] | None = None) -> None:
        if self.objective is not None and self.bound is not None and self.bound > self.objective:
            raise SolverContradiction(
                f"problem {self.problem.name}: {source} reports a lower bound of {self.bound}, but an assignment "
                f"that passes the checker costs {self.objective}"
            )
        entry = Progress(self.seconds, self.objective, self.bound, source)
        self._history.append(entry)
        if self._progress is not None:
            self._progress(replace(entry, choices=choices))

    def result(self, infeasible: Status | None = None) -> SolveResult:
        """Close the ledger.

        Parameters
        ----------
        infeasible
            ``INFEASIBLE`` or ``INFEASIBLE_UNCONFIRMED`` where that was found, else None.
        """
        if infeasible is not None and self.choices is not None:
            raise SolverContradiction(
                f"problem {self.problem.name}: {self.solver} reports that nothing is feasible, but an assignment "
                f"that passes the checker costs {self.objective}"
            )
        return SolveResult(
            status=infeasible or self._status(),
            choices=self.choices,
            objective=self.objective,
            bound=None if infeasible is not None else self.bound,
            gap=None if infeasible is not None else relative_gap(self.objective, self.bound),
            solver=self.solver,
            seconds=self.seconds,
            cpu_seconds=self.cpu_seconds,
            peak_rss_bytes=self.peak_rss_bytes,
            peak_usage=tuple(peak.usage for peak in self._report.peaks) if self._report else (),
            history=tuple(self._history),
            message="; ".join(dict.fromkeys(self._notes)),
        )

    def _status(self) -> Status:
        if self.objective is None:
            return Status.NO_SOLUTION if self.bound is None else Status.BOUND_ONLY
        closed = self.bound is not None and self.options.accepts(self.objective, self.bound)
        return Status.OPTIMAL if closed else Status.FEASIBLE
