"""Cutting forbidden strategies out keeps the optimum and knows the way there and back."""

from __future__ import annotations

import numpy as np
import pytest

from formulations.checker import check
from formulations.presolve.allowed_strategies import cut_forbidden_strategies
from formulations.random_problems import random_problem
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
