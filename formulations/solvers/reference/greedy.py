"""A quick feasible assignment: decode at rising memory prices, repair, fill.

No bound is claimed. Prices start flat over all rows that can bind and are raised where usage is over its
limit; each level is decoded from a few sweeps of message passing, repaired and filled.
"""

from __future__ import annotations

import time

import numpy as np

from formulations.problem.compiled import seed_compiled
from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.local_search.incumbent_search import IncumbentSearch
from formulations.solvers.local_search.tunables import FORCED_STEPS
from formulations.solvers.prices.ascent import PriceAscent
from formulations.solvers.prices.flatten_or_finish import flatten_or_finish
from formulations.solvers.prices.raised_prices import raised_prices
from formulations.solvers.prices.tunables import PAIRS, RAISED_MASS
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress

GREEDY_ROUNDS = 12
"""Not tunable: levels of prices of a method that stays plain."""


def solve(problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent) -> Claim:
    """Run a dozen rounds (or ``iteration_limit``, or until the time limit) and return the best assignment."""
    started = time.monotonic()
    flat = flatten_or_finish(problem, incumbent)
    if isinstance(flat, Claim):
        return flat
    seed_compiled(options.seed)

    def found(choices: tuple[int, ...], objective: int) -> None:
        incumbent(choices)
        report(Progress(time.monotonic() - started, objective, None, "greedy"))

    deadline = started + options.time_limit
    search = IncumbentSearch(problem, flat, found, deadline)
    ascent = PriceAscent(flat)
    limit = flat.usage.limit
    prices = np.zeros(len(limit))
    nodes = len(flat.graph.sizes)
    if options.initial_choices is not None:
        start = flat.flat_choices(options.initial_choices)
        if start is not None:
            search.finish(start, prices)
    rounds = 0
    most = GREEDY_ROUNDS if options.iteration_limit is None else options.iteration_limit
    while rounds < most and time.monotonic() < deadline:
        rounds += 1
        ascent.prices = prices
        ascent.sweeps(PAIRS)
        choices = ascent.choices.copy()
        search.set_prices(prices)
        search.settle(choices)
        search.finish(choices, prices)
        if search.best is None:
            search.force_feasible(choices, FORCED_STEPS, deadline)
        usage = search.usage(choices)
        if not (usage > limit).any():
            break
        prices = raised_prices(prices, usage, limit, ascent.temperature_scale() * nodes * RAISED_MASS)
    if search.best is None:
        return Claim(None, None, message=f"no feasible assignment in {rounds} rounds", iterations=rounds)
    return Claim(flat.original_choices(search.best), None, iterations=rounds)
