"""What the tree reports on the way; that its proofs hold is in the differential tests."""

from __future__ import annotations

import numpy as np
import pytest
from support.problems.tight_problems import tight_problem
from support.tiers import slow

from formulations.problem.checker import check
from formulations.problem.solution import SolveOptions
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.branching import branch_and_bound
from formulations.solvers.exact import brute_force


@pytest.mark.parametrize("seeds", [range(120), slow(range(120, 400))], ids=["sample", "length"])
@pytest.mark.parametrize("start", ["none", "dearest", "best"])
def test_bounds_rise_to_the_optimum_whatever_the_tree_begins_from(start: str, seeds: range) -> None:
    """With the dearest assignment it begins on a large core, and again on smaller ones for better ones."""
    branched = 0
    for seed in seeds:
        problem = tight_problem(seed)
        truth = brute_force.solve(problem, SolveOptions(), lambda _: None, lambda _: None)
        if truth.choices is None or truth.bound is None:
            continue
        begin = {"none": None, "best": truth.choices, "dearest": dearest(problem, seed)}[start]
        bounds: list[int] = []
        claim = branch_and_bound.solve(
            problem,
            SolveOptions(initial_choices=begin),
            lambda line, own=bounds: own.append(line.bound or 0),
            lambda _: None,
            most_enumerated=1,
        )
        if "too large" in claim.message:
            continue
        branched += claim.iterations > 1
        assert bounds == sorted(bounds), seed
        assert claim.bound == truth.bound, seed
        assert max(bounds, default=truth.bound) <= truth.bound, seed
        assert claim.choices is not None
        assert check(problem, claim.choices).objective == truth.bound, seed
    assert branched >= len(seeds) // 30


def dearest(problem: StrategyProblem, seed: int) -> tuple[int, ...] | None:
    """The dearest feasible one of a hundred random assignments, if any."""
    rng = np.random.default_rng(seed)
    drawn = [tuple(int(rng.integers(node.size)) for node in problem.nodes) for _ in range(100)]
    feasible = [(report.objective or 0, own) for own in drawn if (report := check(problem, own)).ok]
    return max(feasible)[1] if feasible else None


@pytest.mark.parametrize("seeds", [range(60), slow(range(60, 400))], ids=["sample", "length"])
def test_below_a_cost_the_optimum_is_found_or_the_cost_is_the_bound(seeds: range) -> None:
    found = excluded = 0
    for seed in seeds:
        problem = tight_problem(seed)
        optimum = brute_force.solve(problem, SolveOptions(), lambda _: None, lambda _: None).bound
        for below in () if optimum is None else (optimum - 1, optimum, optimum + 1, optimum + 1000):
            assert optimum is not None
            claim = branch_and_bound.solve(
                problem, SolveOptions(), lambda _: None, lambda _: None, most_enumerated=1, below=below
            )
            if "too large" in claim.message:
                continue
            assert not claim.proved_infeasible, seed
            assert claim.bound == min(below, optimum), seed
            if below > optimum:
                assert claim.choices is not None, seed
                assert check(problem, claim.choices).objective == optimum, seed
            found += below > optimum
            excluded += below <= optimum
    assert found >= 20
    assert excluded >= 20
