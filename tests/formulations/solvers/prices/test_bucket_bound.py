"""Bounds by dynamic programming: rounded slack keeps them below the optimum, and large sums stay in 64 bits."""

from __future__ import annotations

import numpy as np
import pytest
from support.problems.random_problems import random_problem

from formulations.encodings.elimination import CostTable, Sums
from formulations.problem.solution import SolveOptions, Status
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.prices import bucket_bound
from formulations.solvers.running.run import solve_in_process

PROBLEMS = 150


def bound_of(problem: StrategyProblem) -> int | None:
    return bucket_bound.solve(problem, SolveOptions(time_limit=60.0), lambda _: None, lambda _: None).bound


@pytest.mark.parametrize("bits", [4, 12, 58])
def test_rounded_slack_keeps_the_bound_valid(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few bits nearly all slack is rounded away, with 58 none of these problems' is."""
    monkeypatch.setattr(bucket_bound, "_SUM_BITS", bits)
    closed = 0
    for seed in range(PROBLEMS):
        problem = random_problem(seed)
        best = solve_in_process(problem, "brute_force", SolveOptions())
        if best.status is not Status.OPTIMAL or best.objective is None:
            continue
        bound = bound_of(problem)
        assert bound is not None, seed
        assert bound <= best.objective, seed
        closed += bound == best.objective
    assert closed > 0 or bits == 4


def test_sums_beyond_64_bits_are_rounded_into_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's integers would be ten times as slow."""
    beyond = 0
    original = bucket_bound.least_sum_bound

    def watched(sizes: list[int], tables: list[CostTable], entries: int, deadline: float) -> int | None:
        nonlocal beyond
        beyond += any(table.cost.dtype == np.object_ for table in tables)
        assert Sums.of(tables).dtype is np.int64
        return original(sizes, tables, entries, deadline)

    monkeypatch.setattr(bucket_bound, "least_sum_bound", watched)
    for seed in range(20):
        bound_of(random_problem(seed))
    assert beyond > 0
