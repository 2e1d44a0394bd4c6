"""Probing against enumeration: what it leaves out is worth nothing, and what fits nowhere goes."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from support.problems.random_problems import random_problem
from support.problems.tight_problems import tight_problem

from formulations.problem.checker import check
from formulations.problem.strategy_problem import Node, Resource, StrategyProblem, UsageTerm
from formulations.solvers.branching import price_probing
from formulations.solvers.branching.price_probing import forbid_above

SECONDS = 60.0
SEEDS, BATCHES = 200, 10


def costs(problem: StrategyProblem) -> dict[tuple[int, ...], int]:
    """Cost of every assignment within the limits."""
    found = {}
    for choices in product(*(range(node.size) for node in problem.nodes)):
        report = check(problem, choices)
        if report.ok:
            assert report.objective is not None
            found[choices] = report.objective
    return found


def lumpy(limit: int) -> StrategyProblem:
    """One node uses 90 or 50, twelve more 4 or 1 each; what uses more is cheaper."""
    usage = [(90, 50), *[(4, 1)] * 12]
    nodes = [
        Node(f"n{i}", np.array([0, 10]), None, (UsageTerm(0, 0, 1, np.array(amounts)),))
        for i, amounts in enumerate(usage)
    ]
    return StrategyProblem("lumpy", tuple(nodes), (), (Resource("memory", limit),), 1)


def forbidden(problem: StrategyProblem, i: int) -> list[bool]:
    flags = problem.nodes[i].forbidden
    return [False] * problem.nodes[i].size if flags is None else flags.tolist()


@pytest.mark.parametrize("batch", [0, *(pytest.param(k, marks=pytest.mark.fuzz) for k in range(1, BATCHES))])
def test_nothing_at_most_as_dear_as_the_objective_is_lost(batch, monkeypatch):
    monkeypatch.setattr(price_probing, "SHORT_ASCENT", 10)
    cut = 0
    for seed in range(batch, SEEDS, BATCHES):
        problem = tight_problem(seed) if seed % 3 else random_problem(seed)
        known = costs(problem)
        levels = [None] if not known else [None, min(known.values()), sorted(known.values())[len(known) // 2]]
        for objective in levels:
            left = forbid_above(problem, objective, SECONDS)
            left.validate()
            before, after = known, {choices: cost for choices, cost in known.items() if check(left, choices).ok}
            kept = before if objective is None else {c: cost for c, cost in before.items() if cost <= objective}
            assert kept.items() <= after.items(), (seed, objective)
            cut += sum(sum(forbidden(left, i)) - sum(forbidden(problem, i)) for i in range(len(problem.nodes)))
    assert cut > 0


@pytest.mark.parametrize(("limit", "fits"), [(101, False), (102, True)])
def test_what_fits_nowhere_is_forbidden_without_an_objective(limit, fits):
    assert forbidden(forbid_above(lumpy(limit), None, SECONDS), 0) == [not fits, False]


@pytest.mark.parametrize(("objective", "kept"), [(119, False), (120, True)])
def test_what_costs_more_than_the_objective_is_forbidden(objective, kept):
    problem = lumpy(102)  # 90 leaves one unit for each other node, which then costs 10
    assert forbidden(forbid_above(problem, objective, SECONDS), 0) == [not kept, False]


def test_without_limits_the_problem_stays_as_it_is():
    problem = lumpy(10**6)
    assert forbid_above(problem, 0, SECONDS) is problem
