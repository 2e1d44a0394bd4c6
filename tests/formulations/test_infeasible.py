"""Infeasible problems: two witnesses or no verdict, the smallest limit that fits, and one line that says why."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from support.random_problems import random_problem, training_step_problem, with_limits

from formulations.checker import check
from formulations.problem import Factor, Node, ProblemError, Resource, StrategyProblem, UsageTerm
from formulations.solution import SolveOptions, Status
from formulations.solvers import SolverPool, explain_infeasible, minimum_peak, run, solve, solve_in_process
from formulations.solvers.minimum_peak import without_limit

OPTIONS = SolveOptions(time_limit=30)


@pytest.fixture(scope="module")
def pool() -> Iterator[SolverPool]:
    with SolverPool() as shared:
        yield shared


def tight(limit: int | None) -> StrategyProblem:
    """Peaks at 7 + 4 = 11 at time 2 at best."""
    nodes = (
        Node("weights", np.array([1, 9]), None, (UsageTerm(0, 0, 4, np.array([9, 7])),)),
        Node("activation", np.array([1, 2]), None, (UsageTerm(0, 2, 3, np.array([6, 4])),)),
        Node("late", np.array([0]), None, (UsageTerm(0, 3, 4, np.array([2])),)),
    )
    return StrategyProblem("tight", nodes, (), (Resource("memory", limit),), 4, time_names=("a", "b", "step", "d"))


def impossible_flags() -> StrategyProblem:
    nodes = (Node("a", np.array([0, 0])), Node("b", np.array([0, 0])))
    flags = np.ones((2, 2), dtype=bool)
    resources = (Resource("memory", 5),)
    return StrategyProblem("flags", nodes, (Factor((0, 1), np.zeros((2, 2), dtype=np.int64), flags),), resources, 1)


@pytest.mark.parametrize("name", ["highs", "cpsat", "pyomo", "tree_dp", "brute_force"])
@pytest.mark.parametrize("problem", [impossible_flags(), tight(10)], ids=["flags", "memory"])
def test_two_witnesses_make_infeasible(name: str, problem: StrategyProblem, pool: SolverPool) -> None:
    result = solve(problem, name, OPTIONS, pool=pool)
    if name == "tree_dp" and problem.name == "tight":  # it knows no limits, and says nothing about them
        assert result.status is Status.BOUND_ONLY
        return
    assert result.status is Status.INFEASIBLE
    assert (result.choices, result.objective, result.bound, result.gap) == (None, None, None, None)


def test_one_witness_is_unconfirmed(pool: SolverPool, monkeypatch: pytest.MonkeyPatch) -> None:
    assert solve_in_process(tight(10), "brute_force").status is Status.INFEASIBLE_UNCONFIRMED
    monkeypatch.setattr(run, "CONFIRMERS", ("highs",))
    result = solve(tight(10), "pyomo", OPTIONS, pool=pool)
    assert result.status is Status.INFEASIBLE_UNCONFIRMED
    assert "no second exact solver" in result.message


def test_an_inexact_witness_needs_two_exact_ones(pool: SolverPool, monkeypatch: pytest.MonkeyPatch) -> None:
    claimed = "support.fake_solvers:wrong_infeasible"
    assert solve(tight(10), claimed, OPTIONS, pool=pool).status is Status.INFEASIBLE
    monkeypatch.setattr(run, "CONFIRMERS", ("cpsat",))
    assert solve(tight(10), claimed, OPTIONS, pool=pool).status is Status.INFEASIBLE_UNCONFIRMED


def test_just_enough_is_feasible(pool: SolverPool) -> None:
    for name in ("highs", "cpsat"):
        result = solve(tight(11), name, OPTIONS, pool=pool)
        assert (result.status, result.objective, result.peak_usage) == (Status.OPTIMAL, 11, (11,))


def test_the_smallest_limit_that_fits(pool: SolverPool) -> None:
    found = minimum_peak(tight(3), 0, OPTIONS, pool)
    assert (found.peak, found.bound, found.proved, found.time, found.time_name) == (11, 11, True, 2, "step")
    assert found.alive == ((("weights",), 7), (("activation",), 4))
    with pytest.raises(ProblemError, match="resource 1 does not exist"):
        minimum_peak(tight(3), 1, OPTIONS, pool)


def test_smallest_limits_of_random_problems(pool: SolverPool) -> None:
    feasible = proved = 0
    for seed in range(200):
        problem = random_problem(seed, "tiny")
        if not problem.resources:
            continue
        resource = seed % len(problem.resources)
        unlimited = without_limit(problem, resource)
        reports = [check(unlimited, c) for c in itertools.product(*(range(n.size) for n in problem.nodes))]
        smallest = min((r.peaks[resource].usage for r in reports if r.ok), default=None)
        found = minimum_peak(problem, resource, OPTIONS, pool)
        if smallest is None:
            assert found.infeasible, problem.name
            assert found.peak is None
            continue
        feasible += 1
        assert found.bound <= smallest <= found.peak, problem.name
        if smallest < 2**40:
            assert found.proved, problem.name
        assert found.peak - found.bound <= 1e-5 * found.peak, problem.name
        report = check(unlimited, found.choices)
        assert report.ok
        assert report.peaks[resource].usage == found.peak == sum(amount for _, amount in found.alive)
        proved += found.proved
    assert feasible > 50
    assert proved > 0.7 * feasible


def test_what_is_not_proved_is_called_so(pool: SolverPool) -> None:
    problem = training_step_problem(3, operators=400, strategies=8, memory=0.0)
    found = minimum_peak(problem, 0, SolveOptions(time_limit=1.5), pool)
    assert found.peak is not None
    assert found.bound <= found.peak
    assert found.proved == (found.bound == found.peak)
    assert check(without_limit(problem, 0), found.choices).peaks[0].usage == found.peak
    low = with_limits(problem, [found.bound // 2])
    text = explain_infeasible(low, SolveOptions(time_limit=1.5), pool)
    assert "every assignment needs at least" in text or "smallest possible peak" in text
    assert "\n" not in text


def test_the_line_names_lack_time_nodes_and_remedy(pool: SolverPool) -> None:
    assert explain_infeasible(tight(8), OPTIONS, pool) == (
        "tight: memory is limited to 8, 3 less than the smallest possible peak 11 at time 2 (step), "
        "where weights 7, activation 4 are alive; a limit of 11 fits"
    )
    assert "forbidden combinations exclude every assignment" in explain_infeasible(impossible_flags(), OPTIONS, pool)
    assert "no resource has a limit" in explain_infeasible(tight(None), OPTIONS, pool)


def test_limits_that_exclude_each_other(pool: SolverPool) -> None:
    amounts = (UsageTerm(0, 0, 1, np.array([1, 5])), UsageTerm(1, 0, 1, np.array([5, 1])))
    problem = StrategyProblem(
        "both", (Node("n", np.array([0, 0]), None, amounts),), (), (Resource("device", 2), Resource("host", 2)), 1
    )
    assert solve(problem, "highs", OPTIONS, pool=pool).status is Status.INFEASIBLE
    text = explain_infeasible(problem, OPTIONS, pool)
    assert text == (
        "both: each limit alone (device, host) can be met, but no assignment was found that meets all of them"
    )
    looser = replace(problem, resources=(Resource("device", 2), Resource("host", 5)))
    assert solve(looser, "highs", OPTIONS, pool=pool).status is Status.OPTIMAL
