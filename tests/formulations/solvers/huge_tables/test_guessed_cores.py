"""Cores of guesses: each is either solved, or its guess is a bound; against enumeration."""

from __future__ import annotations

import pytest
from support.problems.random_problems import random_problem
from support.problems.tight_problems import tight_problem
from support.tiers import slow

from formulations.encodings.flat import flatten
from formulations.problem.checker import check
from formulations.problem.solution import Claim, SolveOptions
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.exact import brute_force
from formulations.solvers.huge_tables import guessed_cores
from formulations.solvers.huge_tables.core import Core
from formulations.solvers.prices.ascent import PriceAscent


def _optimum(problem: StrategyProblem) -> int | None:
    return brute_force.solve(problem, SolveOptions(), lambda _: None, lambda _: None).bound


@pytest.mark.parametrize("seeds", [range(60), slow(range(60, 600))], ids=["sample", "length"])
def test_a_core_holds_all_that_costs_less_than_its_guess(seeds: range) -> None:
    solved = excluded = 0
    for seed in seeds:
        problem = tight_problem(seed) if seed % 2 else random_problem(seed)
        flat, optimum = flatten(problem), _optimum(problem)
        if optimum is None or flat.contradiction:
            continue
        ascent = PriceAscent(flat)
        ascent.sweeps(2)
        ascent.step(0.5)
        for guess in (optimum - 1, optimum, optimum + 1, optimum + 50):
            found: list[int | None] = []
            core = Core(
                problem,
                flat,
                ascent,
                Claim(None, None),
                guess,
                lambda _: None,
                lambda choices, problem=problem, found=found: found.append(check(problem, choices).objective),
                0.0,
                float("inf"),
            )
            claim = core.run(SolveOptions())
            assert claim.bound == min(guess, optimum), seed
            if guess > optimum:
                assert claim.choices is not None, seed
                assert check(problem, claim.choices).objective == optimum == found[-1], seed
            solved += guess > optimum
            excluded += guess <= optimum
    assert solved >= 20
    assert excluded >= 20


@pytest.mark.parametrize("seeds", [range(40), slow(range(40, 400))], ids=["sample", "length"])
def test_claims_hold_and_most_gaps_close(seeds: range) -> None:
    feasible = closed = 0
    for seed in seeds:
        problem = tight_problem(seed)
        optimum = _optimum(problem)
        options = SolveOptions(time_limit=30.0, iteration_limit=20)
        claim = guessed_cores.solve(problem, options, lambda _: None, lambda _: None)
        if optimum is None:
            assert claim.choices is None, seed
            continue
        feasible += 1
        assert not claim.proved_infeasible, seed
        assert claim.bound is None or claim.bound <= optimum, seed
        if claim.choices is not None:
            cost = check(problem, claim.choices).objective
            assert cost is not None, seed
            assert cost >= optimum, seed
            closed += claim.bound == cost
    assert feasible >= 10
    assert closed >= 0.7 * feasible
