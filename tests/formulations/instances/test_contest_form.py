"""Any problem in the contest's form: every assignment keeps its cost and whether it fits, through a file as well."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from support.problems.random_problems import random_problem

from formulations.instances.contest import FORBIDDEN_COST, read_contest_problem
from formulations.instances.contest_form import contest_form, write_contest_problem
from formulations.problem.checker import check
from formulations.problem.strategy_problem import Factor, Node, ProblemError, Resource, StrategyProblem, UsageTerm


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_every_assignment_keeps_its_cost_and_whether_it_fits(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 20):
        problem = random_problem(seed, "tiny")
        if any(resource.limit is not None and resource.limit >= 1 << 62 for resource in problem.resources):
            continue
        form = contest_form(problem)
        assert all(len(factor.scope) <= 2 and not factor.usage for factor in form.problem.factors)
        assert all(len(node.usage) <= 1 for node in form.problem.nodes)
        solved = form.problem
        if max(int(table.cost.max(initial=0)) for table in (*solved.nodes, *solved.factors)) < FORBIDDEN_COST:
            write_contest_problem(tmp_path / "problem.json.gz", solved)
            solved = read_contest_problem(tmp_path / "problem.json.gz")
        for choices in itertools.product(*(range(node.size) for node in problem.nodes)):
            expected, whole = check(problem, choices), form.extend(choices)
            found = check(solved, whole)
            assert form.restrict(whole) == choices
            assert found.ok == expected.ok, (seed, choices)
            if found.ok:
                assert found.objective is not None
                assert found.objective + form.offset == expected.objective, (seed, choices)


def test_no_strategy_of_auxiliary_nodes_is_cheaper_than_the_one_that_follows() -> None:
    compared = 0
    for seed in range(150):
        problem = random_problem(seed, "tiny")
        if any(resource.limit is not None and resource.limit >= 1 << 62 for resource in problem.resources):
            continue
        form = contest_form(problem)
        sizes = [node.size for node in form.problem.nodes[form.decisions :]]
        if not 1 < np.prod(sizes, dtype=float) <= 24:
            continue
        compared += 1
        for choices in itertools.product(*(range(node.size) for node in problem.nodes)):
            expected = check(problem, choices)
            others = [check(form.problem, (*choices, *rest)) for rest in itertools.product(*map(range, sizes))]
            costs = [report.objective + form.offset for report in others if report.ok and report.objective is not None]
            assert min(costs, default=None) == (expected.objective if expected.ok else None), (seed, choices)
    assert compared > 10


def test_equal_problems_are_equal_bytes(tmp_path: Path) -> None:
    for name in ("a.json", "b.json", "a.json.gz", "b.json.gz"):
        write_contest_problem(tmp_path / name, contest_form(random_problem(6)).problem)
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert (tmp_path / "a.json.gz").read_bytes() == (tmp_path / "b.json.gz").read_bytes()


def test_a_problem_in_another_form_and_costs_that_mean_forbidden_are_refused(tmp_path: Path) -> None:
    usage = (UsageTerm(0, 0, 1, np.zeros((1, 1), dtype=np.int64)),)
    nodes = (Node("a", np.array([FORBIDDEN_COST])), Node("b", np.array([1])))
    factor = Factor((0, 1), np.zeros((1, 1), dtype=np.int64), None, usage)
    problem = StrategyProblem("large", nodes, (factor,), (Resource("memory", 1),), 1)
    with pytest.raises(ProblemError, match="contest_form"):
        write_contest_problem(tmp_path / "problem.json", problem)
    with pytest.raises(ProblemError, match=r"node 0 \(a\).*10\^18"):
        write_contest_problem(tmp_path / "problem.json", contest_form(problem).problem)
    assert list(tmp_path.iterdir()) == []
