"""Own solvers of instances that are training steps: within a limit, for the smallest peak, and from module to plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from formulations.problem.checker import check
from formulations.problem.solution import Progress, SolveOptions, SolveResult, Status, relative_gap
from formulations.solvers import DEFAULT_SOLVER, SolverPool
from formulations.solvers.peaks.minimum_peak import MinimumPeak, minimum_peak, without_limit
from formulations.step.sharding import MEMORY
from formulations.step.solving.context import Candidate, Executed, SolveContext
from formulations.step.solving.driver import solve_step
from formulations.step.solving.solved import SolvedStep
from formulations.step.solving.step_problem import StepProblem
from formulations.step.training_step import StepDecision
from planner.benchmarks.metering import Meter
from planner.benchmarks.suites import ReportProgress
from planner.common.plan_error import PlanError
from planner.papers.kiwi.cases import PreparedCase, SmallestPeak, StepCase, prepared

SMALLEST_PEAK = "minimum_peak"
"""Name of the solver whose objective is bytes."""

_LEAST_SHARE, _OVERTIME_SHARE = 0.2, 0.15
"""Parts of a row's time limit: the least for solving, however long building took, and the excess of solvers."""

Limit = Callable[[PreparedCase], int]
"""Bytes for tensors on one device of a case."""


def solve_within(
    case: StepCase,
    formulation: str,
    limit: Limit,
    solver: str,
    options: SolveOptions,
    progress: ReportProgress,
    pool: SolverPool | None,
    *,
    begin_with: Sequence[str] = (),
    from_smaller: bool = False,
) -> SolveResult:
    """Build and solve a formulation of a case that is prepared before the clock starts.

    A limit below the proven smallest peak is infeasible at once; above the smallest peak found before, its decision is
    the start. Building the problem takes part of the time limit.

    Formulations of ``begin_with`` are solved before the clock starts, where that was not done for this limit, each
    beginning with those before it. The cheapest of their decisions that the problem contains is a start as well, so
    that the result is no dearer. With ``from_smaller`` the same holds of the formulation's own decisions within smaller
    limits, as far as these were solved before.
    """
    ready = prepared(case)
    nbytes = limit(ready)
    for position, other in enumerate(begin_with):
        if (other, nbytes) not in ready.planned:
            solve_within(
                case,
                other,
                limit,
                solver,
                options,
                lambda _: None,
                pool,
                begin_with=begin_with[:position],
                from_smaller=from_smaller,
            )
    ready.planned[formulation, nbytes] = None
    known = ready.smallest.get(formulation)
    if known is not None and known.bound is not None and known.bound > nbytes:
        return _without_plan(
            Meter(pool), solver, True, f"every plan needs at least {known.bound} bytes, the limit is {nbytes}"
        )
    with Meter(pool) as meter:
        execute = partial(ready.session.execute, limit=nbytes)
        context = SolveContext(execute, solver, options, meter, progress, free=ready.session.free)
        context.warm_up()
        built = ready.session.problem(ready.request(formulation, nbytes, solver, options), meter)
        left = (1.0 - _OVERTIME_SHARE) * options.time_limit - meter.seconds
        left = max(_LEAST_SHARE * options.time_limit, left)
        decision = None if known is None else known.decision
        begin_from = [] if decision is None else _expressible(built, [decision])
        begin_from += _cheapest_contained(
            built,
            [
                each
                for (name, within), each in ready.planned.items()
                if (within == nbytes and name in begin_with)
                or (from_smaller and within < nbytes and name == formulation)
            ],
        )
        found = solve_step(built, replace(context.within(left), known=begin_from))
        if isinstance(found, SolvedStep):
            ready.planned[formulation, nbytes] = Candidate(found.decision, ready.session.execute(found.decision))
        return _measured(found, _counts_all(built), nbytes, meter, solver)


def smallest_peak(
    case: StepCase,
    formulation: str,
    options: SolveOptions,
    progress: ReportProgress,
    pool: SolverPool | None,
) -> SolveResult:
    """Minimise the peak (bytes), beginning with the best of what is known.

    That is the decisions of the formulations that came before, and their layouts with the reruns of each rule. Half of
    the time goes to the problem with bytes rounded up, where there is one: its decisions never exceed its peak.
    """
    ready = prepared(case)
    with Meter(pool) as meter:
        built = ready.session.problem(ready.request(formulation, None, DEFAULT_SOLVER, options), meter)
        problems = [built] if built.overestimate is None else [built.overestimate(), built]
        share = replace(options, time_limit=options.time_limit / len(problems))
        decisions = [known.decision for known in ready.smallest.values() if known.decision is not None]
        decisions += [
            StepDecision(known.layouts, {i: (moment,) for i, moment in reruns.items()})
            for known in decisions
            for reruns in built.rules
        ]
        searched = []
        for each in problems:
            start = _start(each, decisions, ready)
            found = minimum_peak(each.problem, MEMORY, replace(share, initial_choices=start), meter)
            if found.choices is not None:
                decisions.append(each.decode(found.choices))
            searched.append(found)
        best = min(
            _expressible(built, decisions), key=lambda decision: ready.session.execute(decision).peak, default=None
        )
        peak = None if best is None else ready.session.execute(best).peak
        bound = None if built.relaxation is not None else searched[-1].bound
        ready.smallest[formulation] = SmallestPeak(best, peak, bound)
        progress(Progress(meter.seconds, peak, bound, SMALLEST_PEAK))
        return SolveResult(
            _status(peak, bound),
            None,
            peak,
            bound,
            relative_gap(peak, bound),
            SMALLEST_PEAK,
            meter.seconds,
            meter.cpu_seconds,
            meter.peak_rss_bytes,
            () if peak is None else (peak,),
            (Progress(meter.seconds, peak, bound, SMALLEST_PEAK),),
            "objective and bound are bytes on one device",
        )


def plan_from_module(
    case: StepCase,
    formulation: str,
    memory: int,
    solver: str,
    options: SolveOptions,
    progress: ReportProgress,
    pool: SolverPool | None,
) -> SolveResult:
    """Load, trace, build, solve, write the schedule and replay it; all of that is timed.

    Raises
    ------
    PlanError
        If the replay refuses the schedule or its cost is another one.
    """
    with Meter(pool) as meter:
        session = case.session()
        ready = PreparedCase(session, Executed(0, 0), 0)
        context = SolveContext(partial(session.execute, limit=memory), solver, options, meter, progress)
        context.warm_up()
        built = session.problem(ready.request(formulation, memory, solver, options), meter)
        found = solve_step(built, context)
        if isinstance(found, SolvedStep):
            report = session.replay(session.schedule(found.decision, memory), memory)
            if report.violations or report.total_quanta != found.result.objective:
                raise PlanError(
                    f"{case.name}: the replay of the plan disagrees with its model: {report.violations[:1]}"
                )
        return _measured(found, _counts_all(built), memory, meter, solver)


def _counts_all(built: StepProblem) -> bool:
    """Whether a peak's bound on this problem is one on all decisions of the formulation."""
    return built.overestimate is None and built.relaxation is None


def _start(built: StepProblem, decisions: Iterable[StepDecision], ready: PreparedCase) -> tuple[int, ...] | None:
    """Choices of the decision of least peak among those that a problem contains."""
    contained = _expressible(built, decisions)
    if not contained:
        return None
    return built.encoded(min(contained, key=ready.peak))


def _cheapest_contained(built: StepProblem, candidates: Iterable[Candidate | None]) -> list[StepDecision]:
    """The cheapest decision that a problem contains, where it contains any."""
    found = sorted((each for each in candidates if each is not None), key=lambda candidate: candidate.executed.cost)
    return next((one for each in found if (one := _expressible(built, [each.decision]))), [])


def _expressible(built: StepProblem, decisions: Iterable[StepDecision]) -> list[StepDecision]:
    """Decisions that a problem contains, whatever their peak."""
    unlimited = without_limit(built.problem, MEMORY)
    contained = []
    for decision in decisions:
        try:
            complete = built.encoded(decision)
        except ValueError:
            continue
        if built.decode(complete) == decision and check(unlimited, complete).ok:
            contained.append(decision)
    return contained


def _measured(found: SolvedStep | MinimumPeak, counts_all: bool, limit: int, meter: Meter, solver: str) -> SolveResult:
    """The result of all solves together, with their time and memory."""
    if isinstance(found, MinimumPeak):
        proven = found.infeasible or (counts_all and found.bound > limit)
        least = "none found" if found.peak is None else f"{found.peak} bytes"
        return _without_plan(meter, solver, proven, f"limit {limit} bytes; smallest peak found: {least}")
    return replace(
        found.result,
        seconds=meter.seconds,
        cpu_seconds=meter.cpu_seconds,
        peak_rss_bytes=max(meter.peak_rss_bytes, found.result.peak_rss_bytes),
    )


def _without_plan(meter: Meter, solver: str, proven: bool, message: str) -> SolveResult:
    status = Status.INFEASIBLE if proven else Status.NO_SOLUTION
    used = (meter.seconds, meter.cpu_seconds, meter.peak_rss_bytes)
    return SolveResult(status, None, None, None, None, solver, *used, (), (), message)


def _status(peak: int | None, bound: int | None) -> Status:
    if peak is None:
        return Status.NO_SOLUTION if bound is None else Status.BOUND_ONLY
    return Status.OPTIMAL if peak == bound else Status.FEASIBLE
