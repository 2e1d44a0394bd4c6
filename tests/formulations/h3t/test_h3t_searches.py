"""H3T's published searches: what they do as printed and repaired, and that none beats the exact plan."""

from __future__ import annotations

import pytest
from support.problems.h3t_steps import SYNC, enumerated, random_step

from formulations.h3t.dynamic_program import search_dp
from formulations.h3t.exact import least_memory, solve_synchronized
from formulations.h3t.operations import ALL_ON, SETS
from formulations.h3t.problem import H3tError, simulate
from formulations.h3t.sampling import search_greedy, search_random, search_uniform, spread
from formulations.h3t.segments import segment_tables
from formulations.h3t.slips import AS_PRINTED, REPAIRED, Rounding, Slip

SEEDS = [range(20), pytest.param(range(20, 1500), marks=pytest.mark.fuzz)]


@pytest.mark.parametrize("seeds", SEEDS)
def test_no_synchronized_search_beats_the_exact_plan(seeds):
    for seed in seeds:
        step = random_step(seed)
        tables = segment_tables(step)
        exact = solve_synchronized(tables, step.memory_limit)
        for rounding in Rounding:
            for slips in (REPAIRED, AS_PRINTED):
                found = search_dp(tables, step.memory_limit, units=16, rounding=rounding, slips=slips)
                if found.sequence is None:
                    continue
                assert simulate(step, found.sequence) == found.outcome, seed
                if rounding is Rounding.UP:
                    assert found.outcome.peak <= step.memory_limit, seed
                if found.outcome.peak <= step.memory_limit:
                    assert found.outcome.cost >= exact.outcome.cost == exact.bound, seed


@pytest.mark.parametrize("seeds", SEEDS)
def test_both_dynamic_programs_find_plans_as_good(seeds):
    for seed in list(seeds)[::6]:
        step = random_step(seed, most_layers=3)
        tables = segment_tables(step)
        for slips in (REPAIRED, Slip.LIMIT_STRICT, Slip.LAST_LAYER_LOOP):
            pruned = search_dp(tables, step.memory_limit, units=6, slips=slips)
            basic = search_dp(tables, step.memory_limit, units=6, slips=slips, pruned=False)
            assert (pruned.sequence is None) == (basic.sequence is None), seed
            if pruned.sequence is not None:
                assert pruned.outcome.cost == basic.outcome.cost, seed
                assert pruned.states <= basic.states, seed


def test_units_as_fine_as_bytes_are_exact():
    compared = 0
    for seed in range(50):
        step = random_step(seed, most_layers=2)
        if not step.borders.fixed_bytes < step.memory_limit < 120 + step.borders.fixed_bytes:
            continue
        tables = segment_tables(step)
        cost, _ = enumerated(step, range(SYNC, 2 * SYNC))
        found = search_dp(tables, step.memory_limit, units=step.memory_limit - step.borders.fixed_bytes)
        assert (None if found.outcome is None else found.outcome.cost) == cost, seed
        compared += 1
    assert compared > 10


def test_a_strict_limit_refuses_a_peak_of_exactly_the_limit():
    for seed in range(20):
        step = random_step(seed, most_layers=1)
        tables = segment_tables(step)
        room = least_memory(tables)
        units = room - step.borders.fixed_bytes
        if units < 100:
            assert search_dp(tables, room, units=units).sequence is not None
            assert search_dp(tables, room, units=units, slips=Slip.LIMIT_STRICT).sequence is None


def test_greedy_spacing_as_printed_fills_a_prefix():
    assert [spread(10, n, Slip.GREEDY_SPACING).tolist() for n in (3, 6)] == [[0, 3, 6], [0, 1, 2, 3, 4, 5]]
    assert [spread(10, n).tolist() for n in (3, 6)] == [[0, 3, 6], [0, 1, 3, 5, 6, 8]]
    for count in range(1, 12):
        for n in range(1, count + 1):
            for slips in (REPAIRED, AS_PRINTED):
                places = spread(count, n, slips).tolist()
                assert len(set(places)) == n
                assert set(places) <= set(range(count))


def test_greedy_is_no_worse_than_one_set_for_all_layers():
    for seed in range(20):
        step = random_step(seed, most_layers=7)
        uniform, greedy = search_uniform(step), search_greedy(step)
        assert uniform is None or greedy.outcome.cost <= uniform.outcome.cost, seed


@pytest.mark.parametrize("seeds", SEEDS)
def test_searches_with_free_synchronization_find_what_fits(seeds):
    for seed in seeds:
        step = random_step(seed, most_layers=1)
        best, _ = enumerated(step, range(SETS))
        for found in (search_uniform(step), search_greedy(step), search_random(step, seed, 3000)):
            assert (found is None) == (best is None), seed
            if found is not None:
                assert found.outcome.cost == best, seed
                assert simulate(step, found.sequence) == found.outcome, seed
                assert found.outcome.peak <= step.memory_limit, seed


def test_tables_that_are_too_large_are_refused():
    tables = segment_tables(random_step(0))
    with pytest.raises(H3tError, match="units is 1000"):
        search_dp(tables, 100, units=1000, pruned=False)
    with pytest.raises(H3tError, match="units is 0"):
        search_dp(tables, 100, units=0)


def test_a_sequence_of_another_length_is_refused():
    step = random_step(0)
    with pytest.raises(H3tError, match="give one for each"):
        simulate(step, [int(ALL_ON)] * (len(step.layers) + 1))
