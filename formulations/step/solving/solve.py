"""Solving the problem of a step, with memory that is known after the decision is executed.

A formulation's problem may count a little less than what its decision really holds, where that depends on three
decisions at once and the tables would be too large. So every decision is executed on the step's tables; where it
holds more than the limit, the problem that counts a little more is solved as well. The bound stays that of the
first problem, which counted too little and is therefore valid; or it comes from a relaxation, where the problem
leaves out plans that are possible. The cost of the best decision without a limit is a bound as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from formulations.problem.checker import check
from formulations.problem.solution import Progress, SolveOptions, SolveResult, Status, relative_gap
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers import SolverContradiction, SolverPool, find_solver
from formulations.solvers.peaks.minimum_peak import MinimumPeak, minimum_peak
from formulations.solvers.processes.worker import Ending
from formulations.solvers.running.lanes import BLOCKS, PRICES
from formulations.step.sharding import MEMORY
from formulations.step.solving.beside import finds_columns, solve_with_smaller
from formulations.step.solving.bound import BoundBeside
from formulations.step.solving.incumbents import Incumbents
from formulations.step.solving.probing import solve_in_rounds
from formulations.step.solving.registry import StepProblem
from formulations.step.solving.smaller import Executed, Start, encoded
from formulations.step.solving.start import NARROW_SHARE, FreeDecision, begin, start_share, use_block_columns, widen
from formulations.step.training_step import StepDecision

LEAST_START_SECONDS, MOST_START_SECONDS = 2.0, 10.0
"""Time for smaller problems to begin from, beside their share of the time limit: at least (but half of the limit at
most), since nothing is found without layouts to begin from, and at most."""

EXECUTED_SECONDS, EXECUTED_SHARE = 0.8, 0.3
"""Time for executing what is found, where that takes a schedule: at most, and as a part of the time limit."""

CROWDED_SHARE, CROWDED_SECONDS = 0.5, 8.0
"""Where smaller problems are solved beside columns: part of the time limit after which a bound of its own begins, and
seconds that have to be left then. Its first proof takes that long in such problems, and the search needs the time."""

PEAK_SECONDS = 30.0
"""Longest search for the smallest peak, where a solver found no plan."""


@dataclass(frozen=True, slots=True, eq=False)
class SolvedStep:
    """A decision within the limit.

    Parameters
    ----------
    decision
        What was decided.
    result
        The solver's checked result; objective, bound and gap are those of the executed decision.
    problem
        What was solved, under the limit that was asked for.
    """

    decision: StepDecision
    result: SolveResult
    problem: StrategyProblem


def warm_up(solver: str, pool: SolverPool | None) -> None:
    """Start processes for a solver beside what is done meanwhile, as building the problem.

    Raises
    ------
    UnknownSolverError
        There is no such solver.
    """
    spec = find_solver(solver)
    if pool is not None:
        pool.warm_soon(*map(find_solver, (PRICES, BLOCKS)) if spec.is_coordinator else (spec,))


def solve_step(
    built: StepProblem,
    execute: Callable[[StepDecision], Executed],
    solver: str,
    options: SolveOptions,
    progress: Callable[[Progress], None] | None = None,
    pool: SolverPool | None = None,
    known: Sequence[StepDecision] = (),
    free: FreeDecision | None = None,
) -> SolvedStep | MinimumPeak:
    """Find a decision within the limit; where none was found, the smallest peak says why.

    Parameters
    ----------
    built
        The problem under the limit.
    execute
        Executes a decision.
    solver, options
        How to solve it. Smaller problems to begin with take part of the time limit, and a bound that needs a problem of
        its own is found beside. Where counting turns out to matter, what counts it has as long again. Where nothing is
        found, so have beginning and solving once more, and the search for the smallest peak three times as long,
        :data:`PEAK_SECONDS` at most.
    progress
        Called with every better incumbent or bound.
    pool
        Warm workers, or None.
    known
        Decisions that are known already: of those within the limit, none is better than what is found.
    free
        The decision without a limit where it is known; else it is kept here once it is.

    Raises
    ------
    ValueError
        If the problem leaves a known decision out.
    SolverContradiction
        If a bound is above the cost of a decision.
    """
    free = FreeDecision() if free is None else free
    crowded = bool(built.starts) and finds_columns(built.problem, solver)
    after, least = (CROWDED_SHARE, CROWDED_SECONDS) if crowded else (0.0, 0.0)
    with BoundBeside(built.relaxed, options, pool, after, least) as beside:

        def hear(line: Progress) -> None:
            if line.incumbent is not None:
                beside.begin(line.incumbent)
            if progress is not None:
                progress(line)

        return _solve_beside(beside, built, execute, solver, options, hear, pool, known, free)


def _solve_beside(
    beside: BoundBeside,
    built: StepProblem,
    execute: Callable[[StepDecision], Executed],
    solver: str,
    options: SolveOptions,
    progress: Callable[[Progress], None] | None,
    pool: SolverPool | None,
    known: Sequence[StepDecision],
    free: FreeDecision,
) -> SolvedStep | MinimumPeak:
    """Search while a bound is found beside; parameters as for :func:`solve_step`."""
    limit = built.problem.resources[MEMORY].limit
    seconds = beside.search_seconds
    ends = time.monotonic() + seconds
    if built.extended is not None:
        seconds -= min(EXECUTED_SECONDS, EXECUTED_SHARE * seconds)
    whole = options = replace(options, time_limit=seconds)
    if use_block_columns(built, solver):
        solver = BLOCKS
    start, options = _begun(built, execute, solver, options, pool, known, beside.begin, free)
    incumbents = Incumbents(built, execute)

    def hear(line: Progress) -> None:
        incumbents.hear(line)
        if progress is not None:
            progress(line)

    found, start = _solve(built, start, execute, solver, options, hear, pool)
    if isinstance(found, MinimumPeak) and built.has_starts and limit is not None and found.bound <= limit:
        start = begin(built, execute, solver, whole, pool, free=free)
        if start is not None:
            found, start = _solve(built, start, execute, solver, options, hear, pool)
    if isinstance(found, MinimumPeak):
        return found
    assert found.choices is not None
    bound, decision = found.bound, built.decode(found.choices)
    executed = start.executed if start is not None and decision == start.decision else execute(decision)
    fits = limit is None or executed.peak <= limit
    if not fits or (found.objective is not None and executed.cost > found.objective):
        start = incumbents.cheapest_before_last(_cheaper(start, Start(decision, executed) if fits else None), ends)
    if not fits:
        assert built.safer is not None, "a problem that counts everything is never over the limit"
        safer = built.safer()
        second, start = _solve(safer, start, execute, solver, options, progress, pool)
        if not isinstance(second, MinimumPeak) and second.choices is not None:
            decision = safer.decode(second.choices)
            executed = execute(decision)
        if limit is not None and executed.peak > limit:
            if start is None:
                smallest = second if isinstance(second, MinimumPeak) else _smallest(safer.problem, options, pool)
                return _unproven(smallest)
            decision, executed = start.decision, start.executed
    if start is not None and start.executed.cost < executed.cost:
        decision, executed = start.decision, start.executed
    if built.relaxed is not None:
        patient = Ending.INTERRUPTED not in found.message and executed.cost != free.cost
        bound = beside.bound(executed.cost, patient)
    bounds = [each for each in (bound, free.cost) if each is not None]
    return SolvedStep(decision, _certified(found, max(bounds, default=None), executed.cost), built.problem)


def _begun(
    built: StepProblem,
    execute: Callable[[StepDecision], Executed],
    solver: str,
    options: SolveOptions,
    pool: SolverPool | None,
    known: Sequence[StepDecision],
    on_first: Callable[[int], None],
    free: FreeDecision,
) -> tuple[Start | None, SolveOptions]:
    """A decision to begin from, if any is known or the problem has smaller ones, and options for the time left."""
    if not built.has_starts and not known:
        return None, options
    least = min(LEAST_START_SECONDS, options.time_limit / 2)
    longest = min(max(start_share(built, solver) * options.time_limit, least), MOST_START_SECONDS)
    begun = time.monotonic()
    start = begin(built, execute, solver, replace(options, time_limit=longest), pool, known, on_first, free)
    options = _shortened(options, begun, longest)
    if built.narrower is not None and not finds_columns(built.problem, solver):
        longest, begun = NARROW_SHARE * options.time_limit, time.monotonic()
        start = widen(built, start, execute, solver, replace(options, time_limit=longest), pool)
        options = _shortened(options, begun, longest)
    return start, options


def _cheaper(first: Start | None, second: Start | None) -> Start | None:
    """The cheaper of two decisions within the limit, where both are known."""
    return min(
        (each for each in (first, second) if each is not None), key=lambda each: each.executed.cost, default=None
    )


def _shortened(options: SolveOptions, begun: float, longest: float) -> SolveOptions:
    """Options for the time left after something that began at ``begun`` and was to take at most ``longest`` seconds."""
    return replace(options, time_limit=options.time_limit - min(time.monotonic() - begun, longest))


def _smallest(problem: StrategyProblem, options: SolveOptions, pool: SolverPool | None) -> MinimumPeak:
    seconds = min(PEAK_SECONDS, 3 * options.time_limit)
    return minimum_peak(problem, MEMORY, replace(options, time_limit=seconds), pool)


def _unproven(smallest: MinimumPeak) -> MinimumPeak:
    """The smallest peak of a problem that counts too much: what was found counts, its bound proves nothing."""
    return replace(smallest, bound=0, proved=False)


def _solve(
    built: StepProblem,
    start: Start | None,
    execute: Callable[[StepDecision], Executed],
    solver: str,
    options: SolveOptions,
    progress: Callable[[Progress], None] | None,
    pool: SolverPool | None,
) -> tuple[SolveResult | MinimumPeak, Start | None]:
    """Solve from a start, and return it or a better one too.

    Where there is none and nothing was found, solve from an assignment with the smallest peak.

    Raises
    ------
    SolverContradiction
        If nothing is said to fit, but a start does. (One may be over the limit of a problem that counts too much.)
    """
    problem = built.problem
    result, start = solve_with_smaller(built, start, options, execute, solver, pool, progress)
    if result.choices is None and start is not None:
        choices = encoded(built, start.decision)
        if result.status is Status.INFEASIBLE and check(problem, choices).ok:
            raise SolverContradiction(f"{result.solver} says that nothing fits, but a decision does")
        result = replace(result, choices=choices)
    if result.choices is not None:
        return result, start
    smallest = _smallest(problem, options, pool)
    limit = problem.resources[MEMORY].limit
    assert limit is not None, "without a limit every layout fits"
    if smallest.peak is None or smallest.peak > limit:
        return smallest, None
    options = replace(options, initial_choices=smallest.choices)
    return solve_in_rounds(problem, solver, options, progress, pool), None


def _certified(result: SolveResult, bound: int | None, cost: int) -> SolveResult:
    """A result with the cost of its executed decision and a bound for it.

    Raises
    ------
    SolverContradiction
        If the bound is above the cost.
    """
    if bound is not None and bound > cost:
        raise SolverContradiction(f"{result.solver} claims a bound of {bound}, but a decision costs {cost}")
    status = Status.OPTIMAL if bound == cost else Status.FEASIBLE
    return replace(result, objective=cost, bound=bound, gap=relative_gap(cost, bound), status=status)
