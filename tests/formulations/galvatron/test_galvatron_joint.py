"""Whole pipelines: the joint search, Algorithms 1 and 2, and the bounds of windows against enumeration."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from functools import cache
from itertools import combinations, pairwise
from multiprocessing import get_context

import numpy as np
import pytest
from support.problems.galvatron_problems import (
    best_by_enumeration,
    by_cpsat,
    fastest_by_enumeration,
    random_kinds,
    random_pipeline,
    random_tables,
)

from formulations.galvatron.joint import solve_joint
from formulations.galvatron.published_search import search_base, search_bmw
from formulations.galvatron.restated import solve_joint_by_cpsat
from formulations.galvatron.slips import AS_PRINTED, REPAIRED, Slip
from formulations.galvatron.windows import IMPOSSIBLE, window_bounds

SEEDS = range(100)
SAMPLE_AND_FUZZ = [SEEDS, pytest.param(range(100, 1100), marks=pytest.mark.fuzz)]

fastest = cache(lambda seed, ties=False: fastest_by_enumeration(random_pipeline(seed, ties)))


@pytest.mark.slow_cases("sample-gap0-tied", "sample-gap0-free", "sample-gap1-tied")
@pytest.mark.parametrize("ties", [False, True], ids=["free", "tied"])
@pytest.mark.parametrize("gap", [Fraction(0), Fraction(1, 20)])
@pytest.mark.parametrize("seeds", SAMPLE_AND_FUZZ, ids=["sample", "more"])
def test_the_joint_search_finds_the_fastest_plan_and_proves_it(seeds: range, gap: Fraction, ties: bool) -> None:
    feasible = 0
    for seed in seeds:
        problem = random_pipeline(seed, ties)
        best = fastest(seed, ties)
        found = solve_joint(problem, gap)
        if best is None:
            assert found.plan is None, seed
            assert found.bound is None, seed
            continue
        feasible += 1
        least = Fraction(best[1], best[0])
        cost = problem.evaluate(found.plan)
        assert cost.fits, seed
        assert cost.cost == found.cost
        assert found.bound <= least <= found.quanta_per_sample, seed
        assert found.bound >= (1 - gap) * found.quanta_per_sample, seed
    assert feasible > 0.25 * len(seeds)


def test_cpsat_solves_the_restated_problem_to_the_same_optimum() -> None:
    seeds = SEEDS[:40]
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        found = pool.submit(by_cpsat, seeds).result()
    solved = 0
    for seed, (cost, bound, fits) in zip(seeds, found, strict=True):
        joint = solve_joint(random_pipeline(seed), Fraction(0))
        assert (cost, fits) == (joint.quanta_per_sample, True), seed
        assert bound == cost, seed
        solved += cost is not None
    assert solved > 10
    tied = next(problem for seed in SEEDS if (problem := random_pipeline(seed, ties=True)).tied)
    with pytest.raises(ValueError, match="are tied"):
        solve_joint_by_cpsat(tied)


@pytest.mark.parametrize("ties", [False, True], ids=["free", "tied"])
def test_no_time_still_gives_a_true_bound(ties: bool) -> None:
    for seed in SEEDS[:60]:
        problem = random_pipeline(seed, ties)
        best = fastest(seed, ties)
        found = solve_joint(problem, Fraction(0), time_limit=0.0)
        if best is not None:
            assert found.bound is not None
            assert found.bound <= Fraction(best[1], best[0]), seed


def test_a_start_is_never_lost() -> None:
    for seed in SEEDS[:60]:
        problem = random_pipeline(seed)
        start = search_bmw(problem, REPAIRED, 1 + problem.memory_limit // 50).best
        if start is not None:
            found = solve_joint(problem, Fraction(1, 2), start.plan, time_limit=0.0)
            assert found.quanta_per_sample <= Fraction(start.cost, start.plan.batch)


@pytest.mark.parametrize("ties", [False, True], ids=["free", "tied"])
@pytest.mark.parametrize(
    "slips", [REPAIRED, AS_PRINTED ^ Slip.ONE_IN_FLIGHT, AS_PRINTED], ids=["repaired", "kept", "all"]
)
@pytest.mark.parametrize("search", [search_base, search_bmw])
def test_no_published_search_beats_the_optimum(search, slips: Slip, ties: bool) -> None:
    plans = 0
    for seed in SEEDS[:60]:
        problem = random_pipeline(seed, ties)
        found = search(problem, slips, 1 + problem.memory_limit // 50).best
        if found is None:
            continue
        plans += 1
        cost = problem.evaluate(found.plan)
        assert cost.cost == found.cost, seed
        assert sum(found.plan.partition) == problem.layers
        if Slip.ONE_IN_FLIGHT not in slips:
            assert cost.fits, seed
        if cost.fits:
            batch, best = fastest(seed, ties)
            assert Fraction(best, batch) <= Fraction(found.cost, found.plan.batch), seed
    assert plans > 10


def test_bmw_is_never_slower_than_base() -> None:
    for seed in SEEDS:
        problem = random_pipeline(seed)
        base, bmw = (
            search(problem, REPAIRED, 1 + problem.memory_limit // 50).best for search in (search_base, search_bmw)
        )
        assert base is None or not base.is_faster_than(bmw), seed


@pytest.mark.parametrize("search", [search_base, search_bmw])
def test_a_search_without_time_says_that_it_did_not_end(search) -> None:
    for seed in SEEDS[:20]:
        problem = random_pipeline(seed)
        assert search(problem).ended
        found = search(problem, time_limit=0.0)
        assert (found.best, found.ended) == (None, False)


def test_tied_layers_are_in_two_stages_at_most() -> None:
    """The middle one of three may be with the first or with the last; without the ties it is alone."""
    kept_apart = 0
    for seed in range(2000):
        problem = random_pipeline(seed, ties=True)
        if len(problem.tied) < 3 or problem.usable_degrees[-1] < 3:
            continue
        for borders in combinations(range(1, problem.layers), 2):
            pairs = list(pairwise((0, *borders, problem.layers)))
            places = {i for layer in problem.tied for i, (first, end) in enumerate(pairs) if first <= layer < end}
            allowed = all(problem.may_be_stage(*pair) for pair in pairs)
            assert allowed == (len(places) <= 2), (seed, borders)
            kept_apart += not allowed
        if kept_apart > 50:
            return
    raise AssertionError("too few partitions with tied layers in three stages")


def test_windows_are_bounded_from_below() -> None:
    tight = 0
    for seed in range(60):
        rng = np.random.default_rng(seed)
        borrowers = ((), (2,), (1, 3))[seed % 3]
        kinds = np.arange(4) if borrowers else random_kinds(rng, 4)
        tables = random_tables(rng, kinds, 3, borrowers)
        limit = int(rng.integers(0, 40)) * int(max(1, tables.forward.max() // 8))
        bounds = window_bounds(tables, 2, limit)
        for first, end in combinations(range(5), 2):
            stage = tables.stage(first, end, 2, limit)
            for repeated_limit in (None, int(tables.repeated.max()) * 2):
                best = best_by_enumeration(stage, repeated_limit)
                bound = int(bounds.at(repeated_limit)[first, end])
                assert bound >= 0
                assert best is None or bound <= best, (seed, first, end)
                tight += bound == best or (best is None and bound == IMPOSSIBLE)
    assert tight > 300
