"""The checker against a naive replay, and every field of a right solution corrupted in turn."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.problems.random_problems import random_problem, with_limits

from formulations.problem.checker import CheckReport, ViolationKind, check, check_result, tensors_alive, usage_profile
from formulations.problem.solution import SolveResult, Status, relative_gap
from formulations.problem.strategy_problem import Factor, Node, ProblemError, Resource, StrategyProblem, UsageTerm


def _term(resource: int, start: int, end: int, amount: list) -> UsageTerm:
    return UsageTerm(resource, start, end, np.array(amount, dtype=np.int64))


def _small_problem() -> StrategyProblem:
    """Two nodes, one factor that uses memory, two resources; worked out by hand."""
    nodes = (
        Node("a", np.array([5, 1]), np.array([False, False]), (_term(0, 0, 3, [10, 40]), _term(1, 0, 1, [1, 2]))),
        Node("b", np.array([2, 7, 3]), np.array([False, False, True]), (_term(0, 2, 4, [20, 5, 0]),)),
    )
    flags = np.array([[False, False, False], [False, True, False]])
    factor = Factor((0, 1), np.array([[0, 4, 0], [6, 0, 0]]), flags, (_term(0, 2, 3, [[3, 3, 0], [8, 0, 0]]),))
    resources = (Resource("device", 70), Resource("host", None))
    problem = StrategyProblem("hand", nodes, (factor,), resources, 5, time_names=("t0", "t1", "middle", "t3", "t4"))
    problem.validate()
    return problem


def _right_result(problem: StrategyProblem) -> SolveResult:
    return SolveResult(
        status=Status.FEASIBLE,
        choices=(1, 0),
        objective=9,
        bound=8,
        gap=relative_gap(9, 8),
        solver="hand",
        seconds=0.0,
        cpu_seconds=0.0,
        peak_rss_bytes=0,
        peak_usage=(68, 2),
    )


def test_values_worked_out_by_hand() -> None:
    problem = _small_problem()
    report = check(problem, (1, 0), 9, 8)
    assert report.ok
    assert report.objective == 1 + 2 + 6
    assert [(peak.usage, peak.time) for peak in report.peaks] == [(40 + 20 + 8, 2), (2, 0)]
    assert [profile.tolist() for profile in usage_profile(problem, (1, 0))] == [[40, 40, 68, 20, 0], [2, 0, 0, 0, 0]]
    assert tensors_alive(problem, (1, 0), 0, 2) == [((0,), 40), ((1,), 20), ((0, 1), 8)]
    assert check_result(problem, _right_result(problem)).ok


def test_over_limit_names_resource_time_usage_and_limit() -> None:
    problem = with_limits(_small_problem(), [50, 1])
    violations = check(problem, (1, 0)).violations
    assert [(v.kind, v.resource, v.time, v.usage, v.limit) for v in violations] == [
        (ViolationKind.OVER_LIMIT, 0, 2, 68, 50),
        (ViolationKind.OVER_LIMIT, 1, 0, 2, 1),
    ]
    named = StrategyProblem("n", problem.nodes, problem.factors, problem.resources, 5, time_names=("", "", "middle"))
    assert "middle" in check(named, (1, 0)).violations[0].message


@pytest.mark.parametrize(
    ("choices", "kind"),
    [
        ((1,), ViolationKind.WRONG_LENGTH),
        ((1, 0, 0), ViolationKind.WRONG_LENGTH),
        ((1, -1), ViolationKind.CHOICE_OUT_OF_RANGE),
        ((2, 0), ViolationKind.CHOICE_OUT_OF_RANGE),
        ((1, 0.0), ViolationKind.CHOICE_NOT_INTEGER),
        ((1, None), ViolationKind.CHOICE_NOT_INTEGER),
        ((0, 2), ViolationKind.FORBIDDEN_NODE),
        ((1, 1), ViolationKind.FORBIDDEN_FACTOR),
    ],
)
def test_corrupted_choices(choices: tuple, kind: ViolationKind) -> None:
    report = check(_small_problem(), choices)
    assert kind in report.kinds()


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("objective", 8, ViolationKind.OBJECTIVE_MISMATCH),
        ("objective", 10, ViolationKind.OBJECTIVE_MISMATCH),
        ("objective", None, ViolationKind.OBJECTIVE_MISMATCH),
        ("bound", 10, ViolationKind.BOUND_ABOVE_OBJECTIVE),
        ("gap", 0.0, ViolationKind.GAP_MISMATCH),
        ("gap", None, ViolationKind.GAP_MISMATCH),
        ("peak_usage", (67, 2), ViolationKind.PEAK_MISMATCH),
        ("peak_usage", (68,), ViolationKind.PEAK_MISMATCH),
        ("choices", (0, 0), ViolationKind.OBJECTIVE_MISMATCH),
        ("choices", None, ViolationKind.STATUS_MISMATCH),
        ("status", Status.INFEASIBLE, ViolationKind.STATUS_MISMATCH),
        ("status", Status.BOUND_ONLY, ViolationKind.STATUS_MISMATCH),
    ],
)
def test_corrupted_result(field: str, value: object, kind: ViolationKind) -> None:
    problem = _small_problem()
    report = check_result(problem, replace(_right_result(problem), **{field: value}))
    assert kind in report.kinds()


def test_bound_is_not_held_against_an_infeasible_assignment() -> None:
    problem = with_limits(_small_problem(), [50, None])
    assert check(problem, (1, 0), claimed_bound=100).kinds() == {ViolationKind.OVER_LIMIT}


def test_totals_beyond_int64_are_exact() -> None:
    huge = 9 * 10**18
    nodes = tuple(Node(f"n{i}", np.array([huge]), None, (_term(0, 0, 2, [huge]),)) for i in range(2000))
    problem = StrategyProblem("huge", nodes, (), (Resource("device", 10**22),), 3)
    report = check(problem, [0] * 2000, 2000 * huge)
    assert report.objective == 18 * 10**21
    assert report.peaks[0].usage == 18 * 10**21
    assert report.kinds() == {ViolationKind.OVER_LIMIT}


@pytest.mark.parametrize("seed", range(0, 300))
def test_profile_equals_naive_replay(seed: int) -> None:
    problem = random_problem(seed)
    rng = np.random.default_rng(seed)
    choices = [int(rng.integers(node.size)) for node in problem.nodes]
    naive = [[0] * problem.horizon for _ in problem.resources]
    for scope, term in problem.usage_terms():
        for time in range(term.start, term.end):
            naive[term.resource][time] += int(term.amount[tuple(choices[i] for i in scope)])
    report = check(problem, choices)
    assert [[int(v) for v in profile] for profile in usage_profile(problem, choices)] == naive
    for resource, usage in enumerate(naive):
        assert report.peaks[resource].usage == max(usage)
        assert usage.index(max(usage)) == report.peaks[resource].time
        limit = problem.resources[resource].limit
        over = any(v.resource == resource for v in report.violations if v.kind is ViolationKind.OVER_LIMIT)
        assert over == (limit is not None and max(usage) > limit)
        time = int(rng.integers(problem.horizon))
        alive = tensors_alive(problem, choices, resource, time)
        assert sum(amount for _, amount in alive) == usage[time]
        assert [amount for _, amount in alive] == sorted((amount for _, amount in alive), reverse=True)


def test_alive_refuses_what_does_not_exist() -> None:
    problem = _small_problem()
    with pytest.raises(ProblemError, match="resource 2"):
        tensors_alive(problem, (1, 0), 2, 0)
    with pytest.raises(ProblemError, match="time 5"):
        tensors_alive(problem, (1, 0), 0, 5)


def test_empty_problem() -> None:
    problem = StrategyProblem("empty", (), (), (Resource("device", 0),), 0)
    report = check(problem, ())
    assert isinstance(report, CheckReport)
    assert report.ok
    assert report.objective == 0
