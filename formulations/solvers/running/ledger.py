"""Keeps what was found and proved during a solve, and gives it the status that it has earned."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import replace

from formulations.problem.checker import CheckReport, check
from formulations.problem.solution import Progress, Proof, SolveOptions, SolveResult, Status, relative_gap
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.running.bounds import Bounds


class SolverContradiction(RuntimeError):
    """Two proofs that cannot both be true: an exact bound above a feasible objective, or infeasible beside feasible."""


class Ledger:
    """Checked incumbent, bounds and history of one solve.

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
        self.bounds = Bounds()
        self.certified = False
        """Whether a bound in exact integers shows that nothing is feasible."""
        self.complete = False
        """Whether a solver's search ended because nothing was left to search."""
        self.interrupted = False
        """Whether Ctrl-C ended a worker."""
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
                self._refute()
                self._record(source, self.choices)
            return True
        return False

    def raise_bound(self, bound: int | None, source: str) -> None:
        """Keep an exact lower bound if it is better.

        Raises
        ------
        SolverContradiction
            If it exceeds the checked objective.
        """
        if self.bounds.raise_exact(bound, source):
            self._record(source)

    def claim(self, bound: int | None, kind: str, source: str) -> None:
        """Keep what a kind of solver claims as a lower bound, unless the checked objective refutes it."""
        if self.bounds.claim(bound, kind):
            self._refute()
            self._record(source)

    @property
    def proof(self) -> Proof | None:
        """How it is known that the incumbent is optimal, or within the gap that was asked for; None where it is not."""
        return self.bounds.proof(self.objective, self.options.accepts)

    def _refute(self) -> None:
        if self.objective is None:
            return
        for kind, bound in self.bounds.refute(self.objective):
            self.note(
                f"{kind} claimed a bound of {bound}, but an assignment that passes the checker costs {self.objective}: "
                "its claims do not count"
            )

    def _record(self, source: str, choices: tuple[int, ...] | None = None) -> None:
        bound, claimed = self.bounds.exact, self.bounds.claimed
        if self.objective is not None and bound is not None and bound > self.objective:
            raise SolverContradiction(
                f"problem {self.problem.name}: {source} reports a lower bound of {bound}, but an assignment "
                f"that passes the checker costs {self.objective}"
            )
        entry = Progress(self.seconds, self.objective, bound, source, claimed=None if claimed is None else claimed[1])
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
        known, proof = self.bounds.exact, self.proof
        claim = None if proof in (Proof.EXACT, Proof.AGREED) else self.bounds.claimed
        if proof is Proof.AGREED:
            known = self.bounds.agreed
        if infeasible is not None:
            known = None
        return SolveResult(
            status=infeasible or self._status(proof),
            choices=self.choices,
            objective=self.objective,
            bound=known,
            gap=relative_gap(self.objective, known),
            solver=self.solver,
            seconds=self.seconds,
            cpu_seconds=self.cpu_seconds,
            peak_rss_bytes=self.peak_rss_bytes,
            peak_usage=tuple(peak.usage for peak in self._report.peaks) if self._report else (),
            history=tuple(self._history),
            message="; ".join(dict.fromkeys(self._notes)),
            proof=self._kind_of_proof(infeasible, known, proof),
            claimed=None if claim is None else claim[1],
            claimed_by="" if claim is None else claim[0],
            proved_by="" if known is None or proof is Proof.AGREED else self.bounds.exact_by,
        )

    def _kind_of_proof(self, infeasible: Status | None, bound: int | None, proof: Proof | None) -> Proof | None:
        if infeasible is Status.INFEASIBLE_UNCONFIRMED:
            return Proof.CLAIMED
        if infeasible is Status.INFEASIBLE:
            return Proof.EXACT if self.certified else Proof.AGREED
        if bound is None:
            return None
        return Proof.AGREED if proof is Proof.AGREED else Proof.EXACT

    def _status(self, proof: Proof | None) -> Status:
        if self.objective is None:
            return Status.NO_SOLUTION if self.bounds.exact is None else Status.BOUND_ONLY
        return Status.OPTIMAL if proof in (Proof.EXACT, Proof.AGREED) else Status.FEASIBLE
