"""A deep model's problem, with smaller ones that it contains solved beside it.

Columns of a deep model's blocks are one process's work, and find good mixtures of what they are made of. Decisions of
smaller problems (:attr:`StepProblem.starts`) are found by prices in a second or two each and often cheaper than the
first columns; told to the columns, they are mixed with them, and what comes out is better than both. So another
process looks for them meanwhile: those that run again what a rule says first, the largest after them, and the problem
that this one extends at last. Where only one process may be at work, or everything has to be deterministic, they come
before.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Self

from formulations.presolve import is_deep
from formulations.problem.solution import Progress, SolveOptions, SolveResult
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers import DEFAULT_SOLVER, SolverPool, solve
from formulations.solvers.processes.worker import Ending
from formulations.solvers.running.lanes import fair_share_of_memory, worker_count
from formulations.step.solving.probing import solve_in_rounds
from formulations.step.solving.registry import StepProblem
from formulations.step.solving.smaller import Executed, SmallerProblems, Start, begun_from, encoded
from formulations.step.training_step import StepDecision

BEFORE_SHARE = 0.4
"""Part of the time limit that smaller problems have where they come before."""

_AT_WORK = 2
"""Searches that share the memory."""

_LARGEST_SHARES, _LARGEST_SHARE = 3, 0.5
"""Parts of the time that the largest of them has, when each of the others has one, and its part of them where the
problem extends another one."""

_PATIENCE_SECONDS, _PATIENCE = 0.3, 0.6
"""How long one of the others goes on without a better assignment: so many seconds, and this part of the time that it
took to find the last one."""


def finds_columns(problem: StrategyProblem, solver: str) -> bool:
    """Whether a solver begins with columns of repeated blocks of a problem, so that it needs little to begin from."""
    return solver == DEFAULT_SOLVER and is_deep(problem)


def solve_with_smaller(
    built: StepProblem,
    start: Start | None,
    options: SolveOptions,
    execute: Callable[[StepDecision], Executed],
    solver: str,
    pool: SolverPool | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> tuple[SolveResult, Start | None]:
    """Solve a step's problem from a start, with smaller ones beside it where that helps.

    Parameters
    ----------
    built
        The problem under the limit.
    start
        A decision within the limit, if any is known.
    options, solver, pool, progress
        As for :func:`formulations.solvers.solve`.
    execute
        Executes a decision.

    Returns
    -------
    tuple
        What the solver found, and the best decision known beside it.
    """
    if not built.starts or not finds_columns(built.problem, solver):
        return solve_in_rounds(built.problem, solver, begun_from(built, start, options), progress, pool), start
    options = replace(options, memory_limit_bytes=options.memory_limit_bytes or fair_share_of_memory(_AT_WORK))
    with SmallerBeside(built, start, options, execute, solver, pool) as beside:
        options = begun_from(built, beside.best, beside.left_of(options))
        found = solve(built.problem, solver, options, progress, pool, from_others=beside.news)
    return found, beside.best


class SmallerBeside:
    """Smaller problems at work; use it in a ``with`` block, which ends what still runs.

    Parameters
    ----------
    built, start, options, execute, solver, pool
        As for :func:`solve_with_smaller`.
    """

    def __init__(
        self,
        built: StepProblem,
        start: Start | None,
        options: SolveOptions,
        execute: Callable[[StepDecision], Executed],
        solver: str,
        pool: SolverPool | None,
    ) -> None:
        self._beside = worker_count(options) > 1 and options.iteration_limit is None
        self._built, self._solver, self._pool = built, solver, pool
        share = 1.0 if self._beside else BEFORE_SHARE
        within = replace(options, time_limit=share * options.time_limit, workers=1)
        self._problems = SmallerProblems(built, execute, within, self._search)
        self._problems.best = self._told = start
        self._begun = time.monotonic()
        self._patient = True
        self._stop, self._asked = threading.Event(), threading.Event()
        self._executor = ThreadPoolExecutor(1)
        self._work: Future[None] | None = None

    @property
    def best(self) -> Start | None:
        """The cheapest decision known so far."""
        return self._problems.best

    def left_of(self, options: SolveOptions) -> SolveOptions:
        """Options for the time that is left to what is solved beside this, at least what it is to have in any case."""
        left = options.time_limit - (time.monotonic() - self._begun)
        return replace(options, time_limit=max(left, (1.0 - BEFORE_SHARE) * options.time_limit))

    def news(self) -> tuple[int, ...] | None:
        """Choices of the whole problem that mean the best decision, unless it was told before."""
        self._asked.set()
        best = self.best
        if best is None or best is self._told:
            return None
        self._told = best
        return encoded(self._built, best.decision)

    def _run_beside(self) -> None:
        """Begin when the larger problem is with its solver: until then that needs this process, and comes first."""
        self._asked.wait()
        self._run()

    def _run(self) -> None:
        """Solve the smaller problems one after another, until there is nothing left to do or all is over."""
        for build, share, patient in self._turns():
            if self._stop.is_set():
                return
            self._patient = patient or not self._beside
            self._problems.solve(build, share)

    def _turns(self) -> Iterator[tuple[Callable[[], StepProblem], float, bool]]:
        """The smaller problems, their parts of the time that is left, and whether it is used up in any case."""
        largest, *others = self._built.starts
        for k, build in enumerate(reversed(others)):
            yield build, 1.0 / (_LARGEST_SHARES + len(others) - k), False
        yield largest, 1.0 if self._built.extended is None else _LARGEST_SHARE, True
        if self._built.extended is not None:
            yield self._built.extended, 1.0, True

    def _search(
        self, smaller: StepProblem, start: Start | None, options: SolveOptions
    ) -> tuple[SolveResult, Start | None]:
        watch = _Watch(self._cost, self._patient, None if start is None else start.executed.cost)

        def should_stop() -> bool:
            return self._stop.is_set() or watch.is_pointless()

        options = begun_from(smaller, start, options)
        found = solve(smaller.problem, self._solver, options, watch.hear, self._pool, should_stop)
        if Ending.INTERRUPTED in found.message:
            self._stop.set()
            self._problems.end()
        return found, None

    def _cost(self) -> int | None:
        """The lowest cost that is known to fit; what the larger problem's solver finds may not, once executed."""
        return None if self.best is None else self.best.executed.cost

    def __enter__(self) -> Self:
        if self._beside:
            self._work = self._executor.submit(self._run_beside)
        else:
            self._run()
            self._told = self.best
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._asked.set()
        self._problems.end()
        with contextlib.suppress(KeyboardInterrupt):  # what is solved beside this is there: it ends in a moment anyway
            self._executor.shutdown()
            if self._work is not None and error is None:
                self._work.result()


@dataclass(slots=True)
class _Watch:
    """Says when a smaller problem is pointless: nothing in it is cheap enough, or nothing more comes.

    Parameters
    ----------
    cost
        Returns the lowest cost that is known.
    patient
        Whether to go on however long nothing comes.
    incumbent
        Cost that the problem begins from, if any.
    """

    cost: Callable[[], int | None]
    patient: bool
    incumbent: int | None = None
    bound: int | None = None
    begun: float = field(default_factory=time.monotonic)
    improved: float | None = None

    def hear(self, line: Progress) -> None:
        """Take a line of progress."""
        self.bound = line.bound
        if line.incumbent is not None and (self.incumbent is None or line.incumbent < self.incumbent):
            self.incumbent, self.improved = line.incumbent, time.monotonic()

    def is_pointless(self) -> bool:
        """Whether to stop."""
        cost = self.cost()
        if cost is not None and self.bound is not None and self.bound >= cost:
            return True
        if self.patient or self.improved is None:
            return False
        patience = _PATIENCE_SECONDS + _PATIENCE * (self.improved - self.begun)
        return time.monotonic() - self.improved > patience
