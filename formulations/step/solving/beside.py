"""A deep model's problem, with restrictions of it solved in parallel to the solver.

One process generates patterns of a deep model's blocks and combines them into good assignments. Decisions of
restrictions (:attr:`StepProblem.restrictions`) are found by prices in a second or two each and are often cheaper than
the first patterns; combined with them, they give better assignments than either. So another process solves them
meanwhile: those with reruns by rule first, the largest after them, and the base problem last. With two processes at a
time the solver needs both itself. With one, or where the solve has to be deterministic, restrictions come before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from formulations.problem.solution import Progress, SolveOptions, SolveResult
from formulations.solvers import solve
from formulations.solvers.processes.worker import Ending
from formulations.solvers.running.lanes import LEAST_LANES, fair_share_of_memory, runs_alone, worker_count
from formulations.step.solving.background import Background
from formulations.step.solving.context import Candidate, SolveContext
from formulations.step.solving.search import Phase, Search, begun_from
from formulations.step.solving.stages import run_stages
from formulations.step.solving.step_problem import StepProblem

BEFORE_SHARE = 0.4
"""Part of the time limit that restrictions have where they come before."""

_AT_WORK = 2
"""Number of searches that share the memory."""

_PATIENCE_SECONDS, _PATIENCE = 0.3, 0.6
"""How long a restriction goes on without a better assignment: seconds, and a part of the time that it took to find the
last one."""

_UNIMPROVED_SHARE = 0.25
"""Part of its time limit after which a restriction ends that has not improved on what is known."""


def solve_with_restrictions(
    built: StepProblem, start: Candidate | None, context: SolveContext, patient: bool = True
) -> tuple[SolveResult, Candidate | None]:
    """Solve a step's problem from a start, with restrictions in parallel where that helps.

    Parameters
    ----------
    built
        The problem under the limit.
    start
        A decision within the limit, if any is known.
    context
        Solver, options and workers.
    patient
        Whether to go on however long the incumbent does not improve. So it does with restrictions in parallel, and
        where the solve has to be deterministic.

    Returns
    -------
    tuple
        The solver's result, and the best decision of the restrictions.
    """
    options = context.options
    has_room = runs_alone(options) or worker_count(options) > LEAST_LANES
    if not (built.restrictions and has_room and context.solves_by_patterns(built.problem)):
        options = begun_from(built, start, options)
        if patient or runs_alone(options):
            return solve(built.problem, context.solver, options, context.progress, context.pool), start
        cost = None if start is None else start.executed.cost
        patience = Patience(lambda: cost, False, options.time_limit, cost)
        return solve(built.problem, context.solver, options, patience.report, context.pool, patience.is_over), start
    options = replace(options, memory_limit_bytes=options.memory_limit_bytes or fair_share_of_memory(_AT_WORK))
    context = replace(context, options=options)
    with RestrictionsBeside(built, start, context) as beside:
        options = begun_from(built, beside.best, beside.left_of(options))
        found = solve(built.problem, context.solver, options, context.progress, context.pool, from_others=beside.newest)
    return found, beside.best


class RestrictionsBeside(Background):
    """Restrictions solved in the background; leaving the ``with`` block ends what still runs.

    Parameters
    ----------
    built, start, context
        As for :func:`solve_with_restrictions`.
    """

    def __init__(self, built: StepProblem, start: Candidate | None, context: SolveContext) -> None:
        super().__init__()
        options = context.options
        self._is_beside = not runs_alone(options)
        share = 1.0 if self._is_beside else BEFORE_SHARE
        within = replace(options, time_limit=share * options.time_limit, workers=1)
        self._built, self._context = built, context
        self._search = Search(built, replace(context, options=within), self._find)
        self._search.best = self._published = start
        self._begun = time.monotonic()
        self._work: Future[None] | None = None

    @property
    def best(self) -> Candidate | None:
        """The cheapest decision known so far."""
        return self._search.best

    def left_of(self, options: SolveOptions) -> SolveOptions:
        """Options for the time that is left to the solver beside this, at least its guaranteed share."""
        left = options.time_limit - (time.monotonic() - self._begun)
        return replace(options, time_limit=max(left, (1.0 - BEFORE_SHARE) * options.time_limit))

    def newest(self) -> tuple[int, ...] | None:
        """Choices of the whole problem for the best decision, or None if they were returned before."""
        self.go.set()
        best = self.best
        if best is None or best is self._published:
            return None
        self._published = best
        return self._built.encoded(best.decision)

    def end(self) -> None:
        """Stop the restriction at work and begin no other."""
        super().end()
        self._search.end()

    def _run_beside(self) -> None:
        """Begin when the solver runs on the larger problem: until then flattening that problem needs this process."""
        self.go.wait()
        run_stages(Phase.BESIDE, self._search)

    def _find(
        self, smaller: StepProblem, start: Candidate | None, options: SolveOptions, patient: bool
    ) -> tuple[SolveResult, Candidate | None]:
        # Where the result must not depend on the clock, only the time limit ends a restriction.
        limit = options.time_limit if self._is_beside else math.inf
        known = None if start is None else start.executed.cost
        patience = Patience(self._cost, patient or not self._is_beside, limit, known)

        def should_stop() -> bool:
            return self.stop.is_set() or patience.is_over()

        options = begun_from(smaller, start, options)
        found = solve(smaller.problem, self._context.solver, options, patience.report, self._context.pool, should_stop)
        if Ending.INTERRUPTED in found.message:
            self.end()
        return found, None

    def _cost(self) -> int | None:
        """The lowest cost that is known to fit; an incumbent of the larger problem may not fit, once executed."""
        return None if self.best is None else self.best.executed.cost

    def __enter__(self) -> Self:
        if self._is_beside:
            self._work = self.submit(self._run_beside)
        else:
            run_stages(Phase.BESIDE, self._search)
            self._published = self.best
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if self._work is not None and self._work.done() and error is None:
            self._work.result()


@dataclass(slots=True)
class Patience:
    """Criterion to stop a restriction: its bound is too high, or its incumbent has not improved for long.

    Parameters
    ----------
    cost
        Returns the lowest cost that is known.
    patient
        Whether to go on however long the incumbent does not improve any more.
    time_limit
        Seconds that the restriction has.
    incumbent
        Cost that the problem begins from, if any.
    """

    cost: Callable[[], int | None]
    patient: bool
    time_limit: float
    incumbent: int | None = None
    bound: int | None = None
    begun: float = field(default_factory=time.monotonic)
    improved: float | None = None

    def report(self, line: Progress) -> None:
        """Take a line of progress."""
        self.bound = line.bound
        if line.incumbent is not None and (self.incumbent is None or line.incumbent < self.incumbent):
            self.incumbent, self.improved = line.incumbent, time.monotonic()

    def is_over(self) -> bool:
        """Whether to stop."""
        cost = self.cost()
        if cost is not None and self.bound is not None and self.bound >= cost:
            return True
        now = time.monotonic()
        if self.improved is None:
            return cost is not None and now - self.begun > _UNIMPROVED_SHARE * self.time_limit
        if self.patient:
            return False
        return now - self.improved > _PATIENCE_SECONDS + _PATIENCE * (self.improved - self.begun)
