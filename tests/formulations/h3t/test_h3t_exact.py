"""H3T's exact plans against enumeration, and the published searches against the exact plans."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from support.problems.h3t_steps import SYNC, enumerated, random_step

from formulations.galvatron.labels import StageResult
from formulations.h3t import exact as h3t_exact
from formulations.h3t.dynamic_program import search_dp
from formulations.h3t.exact import least_memory, solve_synchronized
from formulations.h3t.problem import H3tError, simulate
from formulations.h3t.segments import segment_tables

SETS = range(SYNC, 2 * SYNC)


@pytest.mark.parametrize("seeds", [range(60), pytest.param(range(60, 3000), marks=pytest.mark.fuzz)])
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


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 2000), marks=pytest.mark.fuzz)])
def test_best_sequences_without_forbidden_sets(seeds):
    for seed in seeds:
        step = random_step(seed, most_layers=2)
        tables = segment_tables(step)
        rng = np.random.default_rng(seed)
        forbidden = rng.random((tables.layers, SYNC)) < rng.choice([0.3, 0.9, 0.98])
        forbidden[np.arange(tables.layers), rng.integers(SYNC, size=tables.layers)] = False
        limit = step.memory_limit
        left = product(*(np.flatnonzero(~row).tolist() for row in forbidden))
        outcomes = [outcome for outcome in map(tables.outcome, left) if outcome.peak <= limit]
        found = solve_synchronized(tables.without(forbidden, limit), limit)
        published = search_dp(tables.without(forbidden, limit), limit)
        for result in (found.sequence, published.sequence):
            assert result is None or not any(row[s % SYNC] for row, s in zip(forbidden, result, strict=True)), seed
        if not outcomes:
            assert found.bound is None, seed
            continue
        cost = min(outcome.cost for outcome in outcomes)
        assert (found.outcome.cost, found.bound) == (cost, cost), seed


def test_giving_up_is_not_infeasible(monkeypatch):
    step = random_step(1, most_layers=2)
    tables = segment_tables(step)
    monkeypatch.setattr(h3t_exact, "solve_stage", lambda *_, **__: StageResult(None, None, 0))
    found = solve_synchronized(tables, step.memory_limit)
    assert (found.outcome, found.bound) == (None, tables.fixed_cost)
    with pytest.raises(H3tError, match=r"is not known: it is between \d+ and \d+ bytes"):
        least_memory(tables)
