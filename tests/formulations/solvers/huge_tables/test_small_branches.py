"""Small parts of branches against enumeration: what is found fits and is cheapest, and no bound is too high."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.problems.random_problems import random_problem

from formulations.encodings.flat import FlatProblem, flatten, message_entries
from formulations.encodings.flat_restriction import narrow
from formulations.problem.checker import check
from formulations.problem.solution import SolveOptions
from formulations.problem.strategy_problem import BoolArray, StrategyProblem
from formulations.solvers.branching.open_leaf import OpenLeaf
from formulations.solvers.exact import brute_force
from formulations.solvers.huge_tables import small_branches
from formulations.solvers.huge_tables.small_branches import settle
from formulations.solvers.prices.integer_bound import holds_exact_costs

SEEDS, BATCHES = 2600, 13
OPTIONS = SolveOptions(time_limit=30.0)


def _part(problem: StrategyProblem, flat: FlatProblem, allowed: BoolArray) -> StrategyProblem:
    """The problem in which all other strategies are forbidden."""
    nodes = []
    for node, supported, flags in zip(
        problem.nodes, flat.supported, np.split(allowed, flat.graph.offset[1:-1]), strict=True
    ):
        forbidden = np.ones(node.size, dtype=np.bool_)
        forbidden[supported[flags]] = False
        nodes.append(replace(node, forbidden=forbidden))
    return replace(problem, nodes=tuple(nodes))


def _optimum(problem: StrategyProblem) -> int | None:
    return brute_force.solve(problem, OPTIONS, lambda _: None, lambda _: None).bound


@pytest.mark.parametrize("entries", [0, 20, 20_000])
@pytest.mark.parametrize("batch", [0, *(pytest.param(b, marks=pytest.mark.fuzz) for b in range(1, BATCHES))])
def test_bound_optimum_incumbent(batch: int, entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small_branches, "SETTLED_ENTRIES", entries)
    seen, found_all, empty = 0, 0, 0
    for seed in range(batch * SEEDS // BATCHES, (batch + 1) * SEEDS // BATCHES):
        random, problem = np.random.default_rng(seed), random_problem(seed)
        flat = flatten(problem)
        if flat.contradiction or not holds_exact_costs(flat) or not len(flat.graph.sizes):
            continue
        restriction = narrow(flat, np.asarray(random.random(len(flat.unary)) < 0.7, dtype=np.bool_))
        if restriction is None:
            continue
        start = np.zeros(len(flat.usage.limit)), np.zeros(message_entries(flat.graph))[restriction.messages]
        leaf = OpenLeaf(flat, restriction, -(1 << 60), start)
        leaf.sweep(1)
        if leaf.closed:
            continue
        optimum = _optimum(_part(problem, flat, leaf.kept()))
        below = int(random.integers(-5, 60)) + (leaf.bound if optimum is None else optimum)
        found = settle(problem, leaf, below, OPTIONS)
        seen += 1
        empty += optimum is None
        if found.bound is not None and optimum is not None:
            assert min(found.bound, below) <= optimum, seed
        if found.choices is not None:
            report = check(problem, found.choices)
            assert report.ok, seed
            assert optimum is not None, seed
            assert report.objective is not None
            assert report.objective >= optimum, seed
        if entries == 20_000:
            worth = below if optimum is None else min(optimum, below)
            assert found.bound == worth, seed
            if optimum is not None and optimum < below:
                assert found.choices is not None, seed
                assert check(problem, found.choices).objective == optimum, seed
                found_all += 1
    assert seen > 60
    assert empty > 0
    assert entries < 20_000 or found_all > 30
