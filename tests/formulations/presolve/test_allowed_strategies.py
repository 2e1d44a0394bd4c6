"""Cutting forbidden strategies out keeps the optimum and knows the way there and back."""

from __future__ import annotations

import numpy as np
import pytest

from formulations.instances.random_problems import random_problem
from formulations.presolve.workspace.allowed_strategies import cut_forbidden_strategies
from formulations.problem.checker import check
from formulations.problem.strategy_problem import Factor, Node, Resource, StrategyProblem, UsageTerm
from formulations.solvers import solve_in_process


@pytest.mark.parametrize("start", range(0, 300, 100))
def test_the_optimum_stays_and_choices_translate(start: int) -> None:
    smaller = 0
    for seed in range(start, start + 100):
        problem = random_problem(seed)
        cut, lift = cut_forbidden_strategies(problem)
        cut.validate()
        smaller += sum(node.size for node in cut.nodes) < sum(node.size for node in problem.nodes)
        best, best_of_cut = solve_in_process(problem, "brute_force"), solve_in_process(cut, "brute_force")
        assert best.objective == best_of_cut.objective
        if best_of_cut.choices is not None:
            report = check(problem, lift(best_of_cut.choices))
            assert report.ok
            assert report.objective == best.objective
            assert lift.project(lift(best_of_cut.choices)) == best_of_cut.choices
    assert smaller > 0


def test_a_cut_strategy_has_no_place() -> None:
    for seed in range(100):
        problem = random_problem(seed)
        lift = cut_forbidden_strategies(problem)[1]
        for i, node in enumerate(problem.nodes):
            if node.forbidden is not None and node.forbidden.any() and not node.forbidden.all():
                choices = [int(kept[0]) for kept in lift.strategies]
                choices[i] = int(np.argmax(node.forbidden))
                assert lift.project(choices) is None


def test_shared_tables_stay_shared() -> None:
    cost, amount = np.arange(9).reshape(3, 3), np.array([0, 5, 5])
    only_first = np.array([False, True, True])
    nodes = [
        Node(str(i), np.arange(3), only_first if i < 2 else None, (UsageTerm(0, i, i + 1, amount),)) for i in range(5)
    ]
    factors = tuple(Factor((i, i + 1), cost) for i in range(4))
    cut, _ = cut_forbidden_strategies(StrategyProblem("shared", tuple(nodes), factors, (Resource("memory", 9),), 5))
    assert [factor.cost.shape for factor in cut.factors] == [(1, 1), (1, 3), (3, 3), (3, 3)]
    assert cut.factors[2].cost is cut.factors[3].cost is cost
    assert cut.nodes[0].cost is not cut.nodes[2].cost
    assert [len(node.usage) for node in cut.nodes] == [0, 0, 1, 1, 1], "what uses nothing any more is gone"
    assert cut.nodes[2].usage[0].amount is cut.nodes[3].usage[0].amount
