"""Context of all stages of a solve: execution of decisions, solver, options, workers, progress."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from formulations.presolve import is_deep
from formulations.problem.solution import KnownBound, Progress, SolveOptions, SolveResult, relative_gap
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers import DEFAULT_SOLVER, SolverPool, find_solver, solve
from formulations.solvers.processes.worker import Ending
from formulations.solvers.running.lanes import BLOCKS, PRICES
from formulations.step.replay import replay_decision
from formulations.step.training_step import StepDecision, StepModel

_ROUND_SECONDS = 60.0
"""Longest time for layouts without which no search can begin, however short the time limit is."""

NEAR_OPTIMAL = 1e-4
"""Gap to the best plan without a limit at which a search ends: costs are known less well than that."""


@dataclass(frozen=True, slots=True)
class Executed:
    """Cost (quanta) and peak (bytes) of a decision when it is executed."""

    cost: int
    peak: int


def executed(model: StepModel, decision: StepDecision) -> Executed:
    """Cost and peak of a decision by replay of a model's tables."""
    replayed = replay_decision(model, decision)
    return Executed(replayed.cost, replayed.peak)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A decision within the limit, executed."""

    decision: StepDecision
    executed: Executed


@dataclass(slots=True)
class FreeDecision:
    """What is known of plans without a limit, which is the same for all limits.

    Parameters
    ----------
    best
        The cheapest one so far.
    bound
        Below what none of them costs (quanta), a lower bound for every formulation.
    """

    best: Candidate | None = None
    bound: KnownBound | None = None

    @property
    def decision(self) -> StepDecision | None:
        """The cheapest decision, once that is proven."""
        return None if self.cost is None or self.best is None else self.best.decision

    @property
    def cost(self) -> int | None:
        """Cost of the cheapest decision (quanta), once that is proven."""
        best, bound = self.best, self.bound
        return None if best is None or bound is None or bound.value != best.executed.cost else bound.value

    def learn(self, candidate: Candidate, bound: KnownBound | None) -> None:
        """Keep a decision and a bound where they are better than what is known."""
        if self.best is None or candidate.executed.cost < self.best.executed.cost:
            self.best = candidate
        if bound is not None and (self.bound is None or bound.value > self.bound.value):
            self.bound = bound

    def is_near(self, cost: int) -> bool:
        """Whether a plan of this cost is optimal, or within :data:`NEAR_OPTIMAL` of it."""
        gap = None if self.bound is None else relative_gap(cost, self.bound.value)
        return gap is not None and gap <= NEAR_OPTIMAL

    def is_as_cheap(self, candidate: Candidate | None) -> bool:
        """Whether a decision within a limit costs no more than the cheapest known one without.

        Reruns and limits only add cost: then nothing is cheaper but a better decision without a limit.
        """
        return candidate is not None and self.best is not None and candidate.executed.cost <= self.best.executed.cost


@dataclass(frozen=True, slots=True)
class SolveContext:
    """Solver, options, workers and known decisions for a step's problem.

    Parameters
    ----------
    execute
        Executes a decision.
    solver, options
        As for :func:`formulations.solvers.solve`.
    pool
        Warm workers, or None.
    progress
        Called with every better incumbent or bound, or None.
    known
        Known decisions: the result is no worse than the best of them within the limit.
    free
        What is known of decisions without a limit; solves write here what they find.
    interrupted
        Set once Ctrl-C has ended a solve: no other one is begun.
    """

    execute: Callable[[StepDecision], Executed]
    solver: str = DEFAULT_SOLVER
    options: SolveOptions = field(default_factory=SolveOptions)
    pool: SolverPool | None = None
    progress: Callable[[Progress], None] | None = None
    known: Sequence[StepDecision] = ()
    free: FreeDecision = field(default_factory=FreeDecision)
    interrupted: threading.Event = field(default_factory=threading.Event)

    def noted(self, result: SolveResult) -> SolveResult:
        """Return a result, and remember where Ctrl-C ended its solve."""
        if Ending.INTERRUPTED in result.message:
            self.interrupted.set()
        return result

    def within(self, seconds: float) -> SolveContext:
        """The same with another time limit."""
        return replace(self, options=replace(self.options, time_limit=seconds))

    def solves_by_patterns(self, problem: StrategyProblem) -> bool:
        """Whether the solver generates patterns of repeated blocks, and so needs no good start."""
        return self.solver == DEFAULT_SOLVER and is_deep(problem)

    def warm_up(self) -> None:
        """Start processes for the solver while the problem is built.

        Raises
        ------
        UnknownSolverError
            There is no such solver.
        """
        spec = find_solver(self.solver)
        if self.pool is not None:
            self.pool.warm_soon(*map(find_solver, (PRICES, BLOCKS)) if spec.is_coordinator else (spec,))


def one_greedy_round(problem: StrategyProblem, options: SolveOptions, pool: SolverPool | None) -> SolveResult:
    """One round of the greedy solver, past the time limit: for layouts without which no search can begin."""
    return solve(problem, "greedy", replace(options, time_limit=_ROUND_SECONDS, iteration_limit=1), None, pool)
