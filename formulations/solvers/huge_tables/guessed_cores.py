"""Prices, then the cores of guesses at the optimum, as a search for assignments.

Prices and messages judge strategies, and what they leave for a guess (:mod:`formulations.solvers.huge_tables.core`) is
a problem of few good strategies, which branch and bound solves where moves at prices find nothing. The first guess
leaves a part of all table entries. While cores are solved soon, guesses go on further from the bound, and closer
to it where a core is too large; a solved core is a bound as well. Moves at prices have as much time as cores, in turn:
where prices leave too much open, they find more.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from formulations.problem.solution import Claim, SolveOptions
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.huge_tables.core import Core, most_columns
from formulations.solvers.huge_tables.tunables import GUESS_FIRST_SHARE
from formulations.solvers.prices.fixing import judged, largest_objective
from formulations.solvers.prices.flatten_or_finish import flatten_or_finish
from formulations.solvers.prices.lagrangian import PriceSearch
from formulations.solvers.prices.tunables import LAST_SHARE
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress

_FIRST_ENTRIES = 0.2
"""Not tunable: part of all table entries that the first guess leaves, at most; sizes of cores lead on from there."""

_GROWTH = 1.5
"""Not tunable: how many times as many entries the next guess leaves; too large a core is tried with its root fewer."""

_MORE_COLUMNS = 2.0
"""Not tunable: columns over those that could be searched to the end in the time left; the first assignments count."""


def solve(problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent) -> Claim:
    """Solve by prices, by cores of guesses, and by prices again for what is left of the time.

    With ``iteration_limit`` (of prices, and of the branches of each core) the solver is deterministic as long as the
    time limit does not cut it short.
    """
    started = time.monotonic()
    flat = flatten_or_finish(problem, incumbent)
    if isinstance(flat, Claim):
        return flat
    first = replace(options, time_limit=GUESS_FIRST_SHARE * options.time_limit)
    prices = PriceSearch(problem, flat, first, report, incumbent, started)
    claim = prices.run()
    if claim.proved_infeasible or claim.bound is None:
        return claim
    _search_cores(problem, prices, options, report, incumbent, started)
    return prices.go_on(options.time_limit)


def _search_cores(
    problem: StrategyProblem,
    prices: PriceSearch,
    options: SolveOptions,
    report: ReportProgress,
    incumbent: ReportIncumbent,
    started: float,
) -> None:
    """Solve cores until one is too large, a guess would leave nothing, or the gap is closed."""
    ascent, search, proven, flat = prices.ascent, prices.search, prices.proven, prices.flat
    proof = judged(flat, ascent.best_prices, ascent.best_messages)
    if proof is None:
        return
    ends = started + LAST_SHARE * options.time_limit
    everything = float(flat.graph.table_size.sum())
    entries, tried, too_large = _FIRST_ENTRIES * everything, 0.0, math.inf
    while tried < entries < too_large and proven.value is not None:
        begun = time.monotonic()
        search.import_incumbent()
        if search.objective is not None and options.accepts(search.objective, proven.value):
            return
        highest = 2 * proof.bound if search.objective is None else search.objective
        guess = largest_objective(flat, proof, entries, highest)
        if time.monotonic() > ends:
            return
        if guess is not None and guess > proven.value:
            known = Claim(None if search.best is None else flat.original_choices(search.best), proven.value)
            core = Core(problem, flat, ascent, known, guess, report, incumbent, started, ends)
            half = replace(options, time_limit=max(0.0, (ends - time.monotonic()) / 2))
            if core.columns > _MORE_COLUMNS * most_columns(half):
                too_large = entries
            else:
                found = core.run(half)
                if found.choices is not None:
                    search.offer_original(found.choices)
                if found.bound is not None:
                    proven.raise_to(found.bound)
        if entries == too_large:
            entries /= _GROWTH**0.5
        else:
            tried, entries = entries, min(_GROWTH * entries, everything)
        prices.walk(min(ends, 2 * time.monotonic() - begun))
