"""Solving the problem of a step under a memory limit: the one driver of all stages.

1. Stages before the solver find a decision to begin from (:mod:`formulations.step.solving.stages`). Where the best one
   without a limit fits, only that problem is left (:mod:`formulations.step.solving.without_limit`).
2. The solver begins from it; in deep models restrictions are solved in parallel where more processes may work at once
   than it has itself.
3. A formulation's problem may count a few bytes less than its decision holds, where that depends on three decisions at
   once and the tables would be too large. So every decision is executed on the step's tables. Where it holds more than
   the limit, the problem with bytes rounded up is solved as well.
4. The bound is that of the first problem, which counted too few bytes and is therefore valid. Where the problem leaves
   out plans that are possible, the bound is that of a relaxation, found beside the search. The cost of the best
   decision without a limit is a bound as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from formulations.problem.checker import check
from formulations.problem.solution import Progress, SolveOptions, SolveResult, Status
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers import SolverContradiction, solve
from formulations.solvers.peaks.minimum_peak import MinimumPeak, minimum_peak, without_limit
from formulations.solvers.processes.worker import Ending
from formulations.solvers.running.lanes import BLOCKS
from formulations.step.sharding import MEMORY
from formulations.step.solving.beside import solve_with_restrictions
from formulations.step.solving.bound import BoundBeside
from formulations.step.solving.context import Candidate, SolveContext, one_greedy_round
from formulations.step.solving.search import LEAST_SECONDS, Incumbents, Phase, Search, cheaper
from formulations.step.solving.solved import SolvedStep, certified
from formulations.step.solving.stages import (
    BEGIN_SHARE,
    SLACK_SHARE,
    is_slack,
    run_stages,
    use_block_columns,
)
from formulations.step.solving.step_problem import StepProblem
from formulations.step.solving.without_limit import solve_without_limit
from formulations.step.training_step import StepDecision

LEAST_BEGIN_SECONDS, MOST_BEGIN_SECONDS = 2.0, 10.0
"""Time for the stages before the solver, beside their share of the time limit: at least (but half of the limit at
most), since nothing is found without layouts to begin from, and at most."""

EXECUTED_SECONDS, EXECUTED_SHARE = 0.8, 0.3
"""Time for executing decisions by their schedules: the most, and as a part of the time limit."""

CROWDED_SHARE, CROWDED_SECONDS = 0.5, 8.0
"""Where restrictions are solved beside the solver: part of the time limit after which a bound of its own begins, and
seconds that have to be left then. Its first proof takes that long in such problems, and the search needs the cores."""

LEAST_MAIN_SHARE = 0.05
"""Part of the time limit below which the problem itself is not begun where a stage has a decision and a bound."""

PEAK_SECONDS = 30.0
"""Longest search for the smallest peak, where a solver found no plan."""


def solve_step(built: StepProblem, context: SolveContext) -> SolvedStep | MinimumPeak:
    """Find a decision within the limit; where none is found, return the smallest peak.

    Parameters
    ----------
    built
        The problem under the limit.
    context
        Solver, options and workers. The stages before the solver take part of the time limit, and a bound that needs a
        problem of its own is computed in parallel. Where bytes are counted too low, the problem with bytes rounded up
        has the same time limit again. Where nothing is found, so has a second attempt of start and solve, and the
        search for the smallest peak three times as much, :data:`PEAK_SECONDS` at most.

    Raises
    ------
    ValueError
        If the problem leaves a known decision out.
    SolverContradiction
        If a bound is above the cost of a decision.
    KeyboardInterrupt
        If Ctrl-C ended a solve before any decision was found.
    """
    crowded = built.relaxation is not None and bool(built.restrictions) and context.solves_by_patterns(built.problem)
    after, least = (CROWDED_SHARE, CROWDED_SECONDS) if crowded else (0.0, 0.0)
    with BoundBeside(built.relaxation, context.options, context.pool, after, least) as bound:
        step = _StepSolve(built, context, bound)
        try:
            return step.run()
        except KeyboardInterrupt:  # between two solves, which return what they have
            step.context.interrupted.set()
            return step.best_when_interrupted()


def begin(
    built: StepProblem, context: SolveContext, on_first: Callable[[int], None] = lambda _: None
) -> Candidate | None:
    """Find a decision to begin from.

    Parameters
    ----------
    built
        The problem under the limit.
    context
        Solver, options and workers for the smaller problems; the time limit is that of all of them together.
    on_first
        Called with the cost of the first decision within the limit, as soon as there is one.

    Returns
    -------
    Candidate or None
        The cheapest decision found that is within the limit when it is executed, if any.

    Raises
    ------
    ValueError
        If the problem leaves a known decision out.
    """
    search = _search(built, context, on_first)
    for decision in context.known:
        built.encode(decision)
        search.keep(decision)
    _run_stages(Phase.BEGIN, search)
    return search.best


def _run_stages(phase: Phase, search: Search) -> None:
    """Run the stages of a phase; Ctrl-C between two solves ends them where something is found.

    Raises
    ------
    KeyboardInterrupt
        Nothing is.
    """
    try:
        run_stages(phase, search)
    except KeyboardInterrupt:
        if search.best is None:
            raise
        search.context.interrupted.set()


def _search(built: StepProblem, context: SolveContext, on_first: Callable[[int], None] = lambda _: None) -> Search:
    def find(
        smaller: StepProblem, start: Candidate | None, options: SolveOptions, patient: bool
    ) -> tuple[SolveResult, Candidate | None]:
        return solve_with_restrictions(smaller, start, replace(context, options=options, progress=None), patient)

    return Search(built, context, find, on_first)


class _StepSolve:
    """One solve of a step's problem, with a bound in parallel; arguments as for :func:`solve_step`."""

    def __init__(self, built: StepProblem, context: SolveContext, bound: BoundBeside) -> None:
        self.built, self.bound, self.progress = built, bound, context.progress
        seconds = bound.search_seconds
        self.begun = time.monotonic()
        self.ends = self.begun + seconds
        if built.base_problem is not None:
            seconds -= min(EXECUTED_SECONDS, EXECUTED_SHARE * seconds)
        solver = BLOCKS if use_block_columns(built, context.solver) else context.solver
        self.context = replace(context.within(seconds), solver=solver, progress=self._report)
        self.kept = _search(built, self.context)
        self.incumbents = Incumbents(self.kept)

    def run(self) -> SolvedStep | MinimumPeak:
        """Find a start, solve, execute the decision, and bound its cost."""
        self.kept.best, left = self._begun()
        if self.context.interrupted.is_set():
            return self.best_when_interrupted()
        if self._is_proven(left):
            assert self.kept.best is not None
            return self._proven(self._known(self.kept.best), self.kept.best)
        begun = time.monotonic()
        without = solve_without_limit(self.kept, left)
        now = time.monotonic()
        if without is not None:
            return replace(without, result=replace(without.result, seconds=now - self.begun))
        if self.context.interrupted.is_set():
            return self.best_when_interrupted()
        left = left.within(max(LEAST_SECONDS, left.options.time_limit - (now - begun)))
        main = replace(left, progress=self._report_choices)
        found, self.kept.best = solve_or_smallest_peak(self.built, self.kept.best, main)
        if isinstance(found, MinimumPeak) and self._may_fit(found):
            start = begin(self.built, replace(self.context, known=()))
            if start is not None:
                found, self.kept.best = solve_or_smallest_peak(self.built, start, main)
        if isinstance(found, MinimumPeak):
            return found
        assert found.choices is not None
        chosen = self._executed(self.built.decode(found.choices))
        if chosen is None or (found.objective is not None and chosen.executed.cost > found.objective):
            self.incumbents.execute_before_last(self.ends)
        if chosen is None:
            if self.context.interrupted.is_set():
                return self.best_when_interrupted()
            rounded = self._overestimated(left)
            if isinstance(rounded, MinimumPeak):
                return rounded
            chosen = rounded
        chosen = cheaper(chosen, self.kept.best)
        assert chosen is not None
        return self._proven(found, chosen)

    def best_when_interrupted(self) -> SolvedStep:
        """The best decision when Ctrl-C ended a solve.

        Raises
        ------
        KeyboardInterrupt
            There is none.
        """
        best = self.kept.best
        if best is None:
            raise KeyboardInterrupt
        return self._proven(replace(self._known(best), message=Ending.INTERRUPTED), best)

    def _known(self, best: Candidate) -> SolveResult:
        """The result where no solver ran on the problem itself."""
        seconds, solver, executed = time.monotonic() - self.begun, self.context.solver, best.executed
        return SolveResult(Status.FEASIBLE, None, executed.cost, None, None, solver, seconds, 0.0, 0, (executed.peak,))

    def _is_proven(self, left: SolveContext) -> bool:
        """Whether a stage's bound closes the gap to the best decision, or leaves too little time to go on."""
        best, bound = self.kept.best, self.kept.bound
        if best is None or bound is None:
            return False
        is_closed = self.context.options.accepts(best.executed.cost, bound.value)
        return is_closed or left.options.time_limit < LEAST_MAIN_SHARE * self.context.options.time_limit

    def _begun(self) -> tuple[Candidate | None, SolveContext]:
        """A decision to begin from where one is known or problems are smaller, and the context of the time left."""
        built, context = self.built, self.context
        if not built.has_smaller and not context.known:
            return None, context
        seconds = context.options.time_limit
        least = min(LEAST_BEGIN_SECONDS, seconds / 2)
        longest = min(max(BEGIN_SHARE * seconds, least), MOST_BEGIN_SECONDS)
        if is_slack(built):
            longest = SLACK_SHARE * seconds
        begun = time.monotonic()
        start = begin(built, context.within(longest), self.bound.begin)
        seconds -= min(time.monotonic() - begun, longest)
        is_free = start is not None and (context.free.is_near(start.executed.cost) or context.free.is_as_cheap(start))
        if is_free or context.interrupted.is_set():
            return start, context.within(seconds)
        begun = time.monotonic()
        search = _search(built, context.within(seconds))
        search.best, search.report = start, self._report
        _run_stages(Phase.WIDEN, search)
        self.kept.learn(search.bound)
        return search.best, context.within(max(LEAST_SECONDS, seconds - (time.monotonic() - begun)))

    def _may_fit(self, smallest: MinimumPeak) -> bool:
        """Whether a decision may fit although none was found, and there are smaller problems to begin from."""
        limit = self.built.memory_limit
        return self.built.has_smaller and limit is not None and smallest.bound <= limit

    def _executed(self, decision: StepDecision) -> Candidate | None:
        """A decision executed and kept, or None where it is over the limit."""
        known = self.kept.best
        if known is not None and decision == known.decision:
            return known
        return self.kept.execute(decision)

    def _overestimated(self, context: SolveContext) -> Candidate | MinimumPeak | None:
        """A decision of the problem with bytes rounded up, or the smallest peak where nothing fits."""
        assert self.built.overestimate is not None, "a problem that counts every byte is never over the limit"
        rounded = self.built.overestimate()
        found, self.kept.best = solve_or_smallest_peak(rounded, self.kept.best, context)
        chosen = None
        if not isinstance(found, MinimumPeak) and found.choices is not None:
            chosen = self.kept.execute(rounded.decode(found.choices))
        if chosen is not None or self.kept.best is not None:
            return chosen
        smallest = found if isinstance(found, MinimumPeak) else _smallest_peak(rounded.problem, context)
        return replace(smallest, bound=0, proved=False)  # where bytes are rounded up, no bound holds

    def _proven(self, found: SolveResult, chosen: Candidate) -> SolvedStep:
        """The chosen decision with the best bound that is known."""
        cost, free = chosen.executed.cost, self.context.free
        bounds = [found.known_bound, self.kept.bound]
        if self.built.relaxation is not None:
            bounds = [self.bound.bound(cost, patient=Ending.INTERRUPTED not in found.message and cost != free.cost)]
            if self.bound.interrupted:
                found = replace(found, message=Ending.INTERRUPTED)
            found = replace(found, claimed=None, claimed_by="")  # it is claimed of a problem that leaves plans out
        bounds.append(free.bound)
        best = max((bound for bound in bounds if bound is not None), key=lambda bound: bound.value, default=None)
        return SolvedStep(chosen.decision, certified(found, best, cost), partial(_bounding_problem, self.built, cost))

    def _report_choices(self, line: Progress) -> None:
        self.incumbents.report(line)
        self._report(line)

    def _report(self, line: Progress) -> None:
        if line.incumbent is not None:
            self.bound.begin(line.incumbent)
        if self.progress is not None:
            self.progress(line)


def solve_or_smallest_peak(
    built: StepProblem, start: Candidate | None, context: SolveContext
) -> tuple[SolveResult | MinimumPeak, Candidate | None]:
    """Solve from a start, and return the better of both.

    Where there is none and nothing was found, take what a greedy round finds without the limit if that is within it;
    else solve from an assignment with the smallest peak.

    Raises
    ------
    SolverContradiction
        If the solver claims that nothing fits, but a start does. (A start may be over the limit with bytes rounded up.)
    KeyboardInterrupt
        If Ctrl-C ended the solve before any assignment was found.
    """
    problem = built.problem
    result, start = solve_with_restrictions(built, start, context)
    context.noted(result)
    if result.choices is None and start is not None:
        choices = built.encoded(start.decision)
        if result.status is Status.INFEASIBLE and check(problem, choices).ok:
            raise SolverContradiction(f"{result.solver} finds that nothing fits, but a decision does")
        result = replace(result, choices=choices)
    if result.choices is not None:
        return result, start
    if context.interrupted.is_set():
        raise KeyboardInterrupt
    if built.unlimited is None and result.status is not Status.INFEASIBLE:  # else a stage has tried the same
        greedy = one_greedy_round(without_limit(problem, MEMORY), context.options, context.pool).choices
        if greedy is not None and check(problem, greedy).ok:
            return replace(result, choices=greedy), None
    smallest = _smallest_peak(problem, context)
    limit = built.memory_limit
    assert limit is not None, "without a limit every layout fits"
    if smallest.peak is None or smallest.peak > limit:
        return smallest, None
    options = replace(context.options, initial_choices=smallest.choices)
    return solve(problem, context.solver, options, context.progress, context.pool), None


def _smallest_peak(problem: StrategyProblem, context: SolveContext) -> MinimumPeak:
    seconds = min(PEAK_SECONDS, 3 * context.options.time_limit)
    options = replace(context.options, time_limit=seconds, relative_gap=0.0)  # the gap asked for is one of cost
    return minimum_peak(problem, MEMORY, options, context.pool)


def _bounding_problem(built: StepProblem, cost: int) -> StrategyProblem:
    return built.problem if built.relaxation is None else built.relaxation(cost)
