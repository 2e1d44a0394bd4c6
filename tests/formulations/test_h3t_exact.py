"""H3T's exact plans against enumeration, and the published searches against the exact plans."""

from __future__ import annotations

import pytest
from support.h3t_steps import SYNC, enumerated, random_step

from formulations.models.h3t import simulate
from formulations.models.h3t_segments import segment_tables
from formulations.searches.h3t_exact import least_memory, solve_synchronized

SETS = range(SYNC, 2 * SYNC)


@pytest.mark.parametrize("seeds", [range(100), pytest.param(range(100, 3000), marks=pytest.mark.fuzz)])
def test_best_synchronized_sequences_of_two_layers(seeds):
    for seed in seeds:
        step = random_step(seed, most_layers=2)
        tables = segment_tables(step)
        cost, peak = enumerated(step, SETS)
        found = solve_synchronized(tables, step.memory_limit)
        assert least_memory(tables) == peak, seed
        if cost is None:
            assert found.bound is None, seed
            continue
        assert (found.outcome.cost, found.bound) == (cost, cost), seed
        assert simulate(step, found.sequence) == found.outcome, seed
        assert found.outcome.peak <= step.memory_limit, seed
