"""Memory prices first; then branch and bound on what the prices leave open.

1. :mod:`formulations.solvers.prices.lagrangian` for part of the time: a bound and prices, and an incumbent
   where none is known yet, or in a deep model, for which patterns of blocks are the only others.
2. Whatever cannot be part of a better assignment is forbidden (:mod:`formulations.solvers.prices.fixing`) and
   presolve runs again on the rest, the *core*.
3. Where the core is too large: branching at prices (:mod:`formulations.solvers.huge_tables.hub_branching`), and after a
   while another look at the core, which a better incumbent makes smaller.
4. :mod:`formulations.solvers.branching.branch_and_bound` on the core, where that is small enough (on the problem
   itself where the first step found no assignment). An assignment is either in the core or costs at least as much as
   the incumbent. So the smaller of the core's bound and the incumbent's cost is a bound. Where the gap is almost
   closed, the cuts of :mod:`formulations.solvers.exact.highs` find the last better assignments first.

Where strategies are so many that tables are very large (:mod:`formulations.solvers.prices.bounding`), others look for
assignments, and the prices of the first step only bound. A core is looked at as soon as few strategies are left. Hubs
are branched on once prices hardly narrow the gap any more.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from formulations.encodings.flat import FlatProblem
from formulations.encodings.linear_model import linear_columns
from formulations.presolve import is_deep
from formulations.problem.solution import Claim, SolveOptions
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.branching import branch_and_bound
from formulations.solvers.huge_tables.core import Core, most_columns
from formulations.solvers.huge_tables.hub_branching import Branching, branch, hubs
from formulations.solvers.huge_tables.tunables import (
    BRANCHED_ENTRIES,
    CORE_ENTRIES_A_COLUMN,
    CORE_FIRST_SHARE,
    CORE_SECOND_SHARE,
    CORE_WIDE_SHARES,
    DECODING_BESIDE,
    DECODING_SHARE,
    NARROWED,
)
from formulations.solvers.local_search.incumbent_search import exact_objective
from formulations.solvers.prices.ascent import PriceAscent
from formulations.solvers.prices.bounding import PriceBounding, is_wide
from formulations.solvers.prices.fixing import entries_left, judged
from formulations.solvers.prices.flatten_or_finish import flatten_or_finish
from formulations.solvers.prices.integer_bound import holds_exact_costs
from formulations.solvers.prices.lagrangian import PriceSearch
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress

_BRANCHING = True
"""Technique: branching at prices where the core is too large."""

_DEEP_SHARE = 0.5
"""Not tunable: part of the time at which prices of a deep model may end, or earlier after :data:`_DEEP_STEPS`."""

_DEEP_STEPS = 25
"""Not tunable: price steps after which the first phase ends there."""

_DEEP_LOOK = 1.2
"""Not tunable: times what prices had when they were last looked at, at which they may end later."""

_DEEP_LAST = 0.9
"""Not tunable: part of the time at which they do."""

_DEEP_GAP = 0.05
"""Not tunable: widest relative gap at which they do; branches do not close a wider one, prices find what narrows it."""


def solve(problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent) -> Claim:
    """Solve by prices, then exactly on what remains.

    With ``iteration_limit`` (of the first step) the solver is deterministic as long as the time limit does
    not cut it short.
    """
    started = time.monotonic()
    ends = started + options.time_limit
    flat = flatten_or_finish(problem, incumbent)
    if isinstance(flat, Claim):
        return flat
    deep = is_deep(problem)
    first = replace(options, time_limit=(_DEEP_SHARE if deep else CORE_FIRST_SHARE) * options.time_limit)
    if is_wide(_entries(flat), len(flat.graph.arity)):
        bounding = PriceBounding(problem, flat, first, report, incumbent, started)
        return _solve_wide(problem, flat, bounding, options, report, incumbent, started)
    prices = PriceSearch(problem, flat, first, report, incumbent, started)
    # Others look for assignments at prices, but in a deep model.
    claim = prices.run(bounding=not deep, most_steps=_DEEP_STEPS if deep else math.inf)
    if claim.proved_infeasible or claim.bound is None:
        return claim
    if deep:
        claim = _climbed(problem, prices, claim, options, started)
    branching: Branching | None = None
    for share in (CORE_SECOND_SHARE, 1.0):
        remaining = _left(options, started)
        if claim.choices is None and _is_small(problem, remaining):
            return branch_and_bound.solve(problem, remaining, report, incumbent)
        if claim.choices is not None and claim.bound is not None:
            objective = exact_objective(problem, claim.choices)
            if options.accepts(objective, claim.bound) or not remaining.time_limit:
                return claim
            if _is_narrowed(flat, prices.ascent, objective, remaining):
                core = Core(problem, flat, prices.ascent, claim, objective, report, incumbent, started, ends)
                remaining = _left(options, started)
                if core.columns <= most_columns(remaining):
                    return core.run(remaining)
        if not (_BRANCHING and holds_exact_costs(flat)):
            claim = prices.go_on(share * options.time_limit)
            continue
        decoding = DECODING_SHARE if deep else DECODING_BESIDE
        branching = branching or Branching(flat, prices, claim, options, report, started, decoding)
        claim = branching.run(share)
        if claim.proved_infeasible:
            break
    return claim


def _climbed(
    problem: StrategyProblem, prices: PriceSearch, claim: Claim, options: SolveOptions, started: float
) -> Claim:
    """Go on with prices while they narrow the gap, or it is wide: before that branches prove less."""
    last = _DEEP_LAST * options.time_limit
    look = time.monotonic() - started
    while look < last:
        look, before = min(_DEEP_LOOK * look, last), claim.bound
        claim = prices.go_on(look)
        if claim.choices is None or claim.bound is None:
            break
        objective = exact_objective(problem, claim.choices)
        is_near = objective - claim.bound <= _DEEP_GAP * objective
        if is_near and _stalls(before, claim.bound, objective):
            break
    return claim


def _solve_wide(
    problem: StrategyProblem,
    flat: FlatProblem,
    bounding: PriceBounding,
    options: SolveOptions,
    report: ReportProgress,
    incumbent: ReportIncumbent,
    started: float,
) -> Claim:
    """Solve a problem of very large tables: raise the bound, and look at the core now and then."""
    claim = bounding.run()
    ends = started + options.time_limit
    branches = _BRANCHING and _entries(flat) <= BRANCHED_ENTRIES and len(hubs(flat)) > 0 and holds_exact_costs(flat)
    bound_before = None
    for share in CORE_WIDE_SHARES:
        if claim.choices is not None:
            objective = exact_objective(problem, claim.choices)
            if claim.bound is not None and options.accepts(objective, claim.bound):
                return claim
            remaining = _left(options, started)
            if _is_narrowed(flat, bounding.ascent, objective, remaining):
                core = Core(problem, flat, bounding.ascent, claim, objective, report, incumbent, started, ends)
                remaining = _left(options, started)
                if core.columns <= most_columns(remaining):
                    return core.run(remaining)
            if branches and _stalls(bound_before, claim.bound, objective):
                return branch(flat, bounding, claim, options, report, started)
        bound_before = claim.bound
        claim = bounding.go_on(share * options.time_limit)
    return claim


def _left(options: SolveOptions, started: float) -> SolveOptions:
    """Return the options for the time that is left."""
    return replace(options, time_limit=max(0.0, started + options.time_limit - time.monotonic()))


def _is_small(problem: StrategyProblem, options: SolveOptions) -> bool:
    """Return whether branch and bound suits a problem in the time that the options leave, unless iterations count."""
    return linear_columns(problem) <= most_columns(options)


def _is_narrowed(flat: FlatProblem, ascent: PriceAscent, objective: int, options: SolveOptions) -> bool:
    """Return whether fixing by reduced cost leaves so little that presolve may make a small problem of it."""
    left = entries_left(flat, judged(flat, ascent.best_prices, ascent.best_messages), objective)
    return left <= CORE_ENTRIES_A_COLUMN * most_columns(options)


def _stalls(before: int | None, bound: int | None, objective: int) -> bool:
    """Return whether the rise of a bound hardly narrowed the gap to ``objective``."""
    return before is not None and bound is not None and bound - before < NARROWED * (objective - before)


def _entries(flat: FlatProblem) -> int:
    """Return how many entries all tables have, those of shared tables counted for every factor, as sweeps read them."""
    return int(flat.graph.table_size.sum())
