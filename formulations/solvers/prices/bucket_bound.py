"""A bound by dynamic programming, as a second opinion on the bounds of other solvers.

The problem is taken as it is, without presolve. Costs are moved by prices and messages of an ascent of its own
(:mod:`formulations.solvers.prices.dual_bound`), which any numbers may be; what is left is bounded by elimination in
mini-buckets (:mod:`formulations.encodings.mini_buckets`). So a mistake of presolve, of the compiled evaluation of
prices or in the exchange of bounds shows as a contradiction.
"""

from __future__ import annotations

import time

from formulations.encodings.elimination import CostTable, OutOfTimeError
from formulations.encodings.mini_buckets import least_sum_bound
from formulations.problem.solution import Claim, Progress, SolveOptions, higher_bound
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.prices.ascent import PriceAscent
from formulations.solvers.prices.dual_bound import reparametrise
from formulations.solvers.prices.flatten_or_finish import flatten_or_finish
from formulations.solvers.prices.tunables import FIRST_PAIRS
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress

_FIRST_ENTRIES, _MOST_ENTRIES, _GROWTH = 1 << 12, 1 << 20, 4
"""Not tunable: table entries of the first elimination and of the last, and their ratio where prices change nothing."""

_SUM_BITS = 58
"""Not tunable: sums of so many bits are added up in 64; slack is rounded down where there would be more."""

_FIRST_STEPS, _MOST_STEPS = 10, 160
"""Not tunable: price steps before the first elimination, and before the last; their number doubles between."""


def solve(problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent) -> Claim:
    """Raise the bound until the time limit; no assignments are looked for.

    Where no limit binds, mini-buckets grow; where one does, better prices help more.
    """
    started = time.monotonic()
    deadline = started + options.time_limit
    flat = flatten_or_finish(problem, incumbent)
    if isinstance(flat, Claim):
        return flat
    ascent = PriceAscent(flat)
    ascent.sweeps(FIRST_PAIRS)
    bound: int | None = None
    steps, entries = _FIRST_STEPS, _FIRST_ENTRIES
    try:
        while ascent.iterations < _MOST_STEPS and entries <= _MOST_ENTRIES:
            while ascent.iterations < steps and time.monotonic() < deadline:
                ascent.step(ascent.iterations / _MOST_STEPS)
            bound = higher_bound(bound, _eliminated(problem, ascent, entries, deadline))
            report(Progress(time.monotonic() - started, None, bound, "bucket_bound"))
            if not ascent.best_prices.any():
                entries *= _GROWTH
            steps *= 2
    except OutOfTimeError:
        pass
    return Claim(None, bound, iterations=ascent.iterations)


def _eliminated(problem: StrategyProblem, ascent: PriceAscent, entries: int, deadline: float) -> int | None:
    """The bound of the best prices and messages by mini-buckets; None where they give none."""
    flat = ascent.flat
    moved = reparametrise(problem, flat, ascent.best_prices, ascent.best_messages)
    known, scale = moved.bound, moved.scale
    shift = max(0, sum(int(slack.max()) for slack in (*moved.nodes, *moved.tables)).bit_length() - _SUM_BITS)
    tables = [CostTable((i,), slack >> shift) for i, slack in enumerate(moved.nodes)]
    for group, slack, allowed in zip(flat.groups, moved.tables, moved.allowed, strict=True):
        slack >>= shift
        tables.append(CostTable(group.scope, slack, None if allowed is None else ~allowed))
    del moved
    more = least_sum_bound(flat.graph.sizes.tolist(), tables, entries, deadline)
    return None if more is None else -((-(known + (more << shift))) // scale)
