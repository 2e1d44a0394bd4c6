"""The phases of a search at prices, in proportion to what its first one took."""

from __future__ import annotations

import time

from support.problems.random_problems import random_problem

from formulations.encodings.flat import flatten
from formulations.problem.checker import check
from formulations.problem.solution import SolveOptions
from formulations.solvers.exact import brute_force
from formulations.solvers.prices.lagrangian import PriceSearch


def test_later_phases_end_in_proportion_to_so_many_price_steps() -> None:
    shortened = 0
    for seed in range(60):
        problem = random_problem(seed)
        flat = flatten(problem)
        optimum = brute_force.solve(problem, SolveOptions(), lambda _: None, lambda _: None).bound
        if flat.contradiction or optimum is None:
            continue
        started = time.monotonic()
        options = SolveOptions(time_limit=600.0)
        search = PriceSearch(problem, flat, options, lambda _: None, lambda _: None, started)
        claim = search.run(most_steps=5)
        assert search.ascent.iterations <= 5
        assert claim.bound is not None
        assert claim.bound <= optimum
        if claim.choices is not None:
            assert check(problem, claim.choices).ok
        if search.options.time_limit < options.time_limit:
            assert search.ascent.iterations == 5
            shortened += 1
    assert shortened > 5
