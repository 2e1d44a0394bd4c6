"""Solving the problem of a step in rounds: between rounds, probing with the best cost fixes decisions.

In a training step a few decisions have most of the memory, and while they are fractional in the relaxations, bounds are
weak and searches are misled. Fixing some of them (:mod:`formulations.solvers.branching.price_probing`) takes a part of
the time and often solves the rest; it fixes more, the cheaper the known plan is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from formulations.presolve import is_deep
from formulations.problem.checker import check
from formulations.problem.solution import Progress, SolveOptions, SolveResult, Status, higher_bound, relative_gap
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers import DEFAULT_SOLVER, SolverPool, solve
from formulations.solvers.branching.price_probing import forbid_above
from formulations.solvers.processes.worker import Ending

_PROBING = True
"""Technique: rounds of probing before and between solves."""

LEAST_ENTRIES, MOST_ENTRIES = 250_000, 3_000_000
"""Table entries from which on, and up to which, probing pays: branch and bound solves small problems in one go, which
rounds would interrupt, and in large ones one price step takes too long. In a deep model columns of its blocks need the
time more."""

LEAST_SECONDS = 0.5
"""Time below which probing fixes nothing."""

_ROUNDS = (0.4, 1.0)
"""Parts of the time after which rounds end."""

_PROBING_SHARE = 0.25
"""Part of a round that probing may take."""

_GOES_ON = (Status.FEASIBLE, Status.NO_SOLUTION, Status.BOUND_ONLY)


def solve_in_rounds(
    problem: StrategyProblem,
    solver: str,
    options: SolveOptions,
    progress: Callable[[Progress], None] | None = None,
    pool: SolverPool | None = None,
) -> SolveResult:
    """Solve in rounds, each without the strategies that probing with the known plan rules out.

    Parameters
    ----------
    problem
        The problem.
    solver, options, progress, pool
        As for :func:`formulations.solvers.solve`. There is one round for solvers other than the default one, and with
        an iteration limit, since probing depends on the time. Ctrl-C ends the rounds.
    """
    entries = sum(factor.cost.size for factor in problem.factors)
    seconds = _ROUNDS[0] * _PROBING_SHARE * options.time_limit
    if (
        not _PROBING
        or solver != DEFAULT_SOLVER
        or options.iteration_limit is not None
        or seconds < LEAST_SECONDS
        or not LEAST_ENTRIES <= entries <= MOST_ENTRIES
        or is_deep(problem)
    ):
        return solve(problem, solver, options, progress, pool)
    started = time.monotonic()
    found: SolveResult | None = None
    for share in _ROUNDS:
        ends = started + share * options.time_limit
        begin = options.initial_choices if found is None or found.choices is None else found.choices
        try:
            rest = forbid_above(problem, _cost(problem, begin), _PROBING_SHARE * (ends - time.monotonic()))
        except KeyboardInterrupt:
            return found or solve(problem, solver, replace(options, time_limit=LEAST_SECONDS), progress, pool)
        now = time.monotonic()
        turn = replace(options, time_limit=max(LEAST_SECONDS, ends - now), initial_choices=begin)
        solved = solve(rest, solver, turn, _later(progress, now - started, found), pool)
        found = _joined(found, solved, now - started)
        if found.status not in _GOES_ON or Ending.INTERRUPTED in solved.message:
            break
    assert found is not None, "there is a first round"
    return found


def _cost(problem: StrategyProblem, choices: tuple[int, ...] | None) -> int | None:
    """Cost of a known assignment, if it is one."""
    report = None if choices is None else check(problem, choices)
    return report.objective if report is not None and report.ok else None


def _later(
    progress: Callable[[Progress], None] | None, seconds: float, first: SolveResult | None
) -> Callable[[Progress], None] | None:
    """Report progress of a round that begins so many seconds after the first, with the first one's bound if better."""
    if progress is None:
        return None
    report, known = progress, None if first is None else first.bound
    return lambda line: report(replace(line, seconds=line.seconds + seconds, bound=higher_bound(known, line.bound)))


def _joined(first: SolveResult | None, second: SolveResult, before: float) -> SolveResult:
    """Joint result of two rounds, with the time of both; the second began so many seconds after the first.

    A round only leaves out plans that cost more than the known one, so that both bounds are valid.
    """
    bound = higher_bound(None if first is None else first.bound, second.bound)
    closed = second.choices is not None and bound == second.objective
    prover = first if first is not None and bound is not None and bound != second.bound else second
    return replace(
        second,
        status=Status.OPTIMAL if closed else second.status,
        bound=bound,
        proof=prover.proof,
        proved_by=prover.proved_by,
        gap=relative_gap(second.objective, bound),
        seconds=before + second.seconds,
        cpu_seconds=second.cpu_seconds + (0.0 if first is None else first.cpu_seconds),
        peak_rss_bytes=max(second.peak_rss_bytes, 0 if first is None else first.peak_rss_bytes),
        history=(
            *(() if first is None else first.history),
            *(replace(line, seconds=line.seconds + before) for line in second.history),
        ),
    )
