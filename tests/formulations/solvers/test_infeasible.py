"""Infeasible problems: two witnesses or no verdict, the smallest limit that fits, and one line that says why."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from support.problems.random_problems import random_problem, training_step_problem, with_limits

from formulations.encodings.flat import flatten
from formulations.problem.checker import check
from formulations.problem.compiled import seed_compiled
from formulations.problem.solution import Claim, Progress, SolveOptions, Status
from formulations.problem.strategy_problem import Factor, Node, ProblemError, Resource, StrategyProblem, UsageTerm
from formulations.solvers import SolverPool, explain_infeasible, minimum_peak, solve, solve_in_process
from formulations.solvers.local_search.feasibility import find_feasible
from formulations.solvers.peaks import falling_limit
from formulations.solvers.peaks import prices as peak_prices
from formulations.solvers.peaks.limit_problem import peak_problem, peak_range
from formulations.solvers.peaks.minimum_peak import without_limit
from formulations.solvers.running import run

OPTIONS = SolveOptions(time_limit=30)


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
    claimed = "support.problems.fake_solvers:wrong_infeasible"
    assert solve(tight(10), claimed, OPTIONS, pool=pool).status is Status.INFEASIBLE
    monkeypatch.setattr(run, "CONFIRMERS", ("cpsat",))
    assert solve(tight(10), claimed, OPTIONS, pool=pool).status is Status.INFEASIBLE_UNCONFIRMED


@pytest.mark.parametrize("name", ["peak_prices", "portfolio"])
def test_a_proof_in_integers_needs_no_second_witness(
    name: str, pool: SolverPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "CONFIRMERS", ())
    assert solve(tight(10), name, OPTIONS, pool=pool).status is Status.INFEASIBLE
    assert solve(impossible_flags(), name, OPTIONS, pool=pool).status is Status.INFEASIBLE
    assert solve(tight(11), name, OPTIONS, pool=pool).choices is not None


def test_a_bound_on_what_is_lacking_is_certified() -> None:
    """Certified claims on hundreds of small problems: none where enumeration finds an assignment."""
    certified = 0
    for seed in range(400):
        problem = random_problem(seed, "tiny")
        claim = peak_prices.solve(problem, SolveOptions(iteration_limit=20), lambda _: None, lambda _: None)
        if claim.certified:
            assert claim.proved_infeasible
            assert not fitting(problem), seed
            certified += 1
    assert certified > 20


def test_a_witness_that_does_not_answer_is_stopped(pool: SolverPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "CONFIRMERS", ("support.problems.fake_solvers:hang",))
    result = solve(tight(10), "support.problems.fake_solvers:wrong_infeasible", SolveOptions(time_limit=1), pool=pool)
    assert result.status is Status.INFEASIBLE_UNCONFIRMED
    assert "hang stopped" in result.message


def test_just_enough_is_feasible(pool: SolverPool) -> None:
    for name in ("highs", "cpsat"):
        result = solve(tight(11), name, OPTIONS, pool=pool)
        assert (result.status, result.objective, result.peak_usage) == (Status.OPTIMAL, 11, (11,))


def test_the_smallest_limit_that_fits(pool: SolverPool) -> None:
    heard: list[Progress] = []
    found = minimum_peak(tight(3), 0, OPTIONS, pool, heard.append)
    assert (heard[-1].incumbent, heard[-1].bound) == (11, 11)
    assert (found.peak, found.bound, found.proved, found.time, found.time_name) == (11, 11, True, 2, "step")
    assert found.alive == ((("weights",), 7), (("activation",), 4))
    with pytest.raises(ProblemError, match="resource 1 does not exist"):
        minimum_peak(tight(3), 1, OPTIONS, pool)


def fitting(problem: StrategyProblem) -> list[tuple[int, ...]]:
    """All feasible assignments, by enumeration and the checker alone."""
    return [c for c in itertools.product(*(range(node.size) for node in problem.nodes)) if check(problem, c).ok]


def test_limits_as_decisions_keep_every_assignment_and_its_peak() -> None:
    for seed in range(60):
        problem = random_problem(seed, "tiny")
        if not problem.resources or len(problem.nodes) > 4:
            continue
        resource = seed % len(problem.resources)
        unlimited = without_limit(problem, resource)
        low, high = peak_range(problem, resource)
        encoded = peak_problem(unlimited, {resource: (low, high)})
        encoded.problem.validate()
        for choices in fitting(unlimited):
            peak = check(unlimited, choices).peaks[resource].usage
            assert low <= peak <= high, problem.name
            for limit, fits in ((peak, True), (peak - 1, False)):
                if limit >= low:
                    both = encoded.with_limits(choices, {resource: limit})
                    assert encoded.original_choices(both) == choices
                    assert (check(encoded.problem, both).ok, check(encoded.problem, both).objective) == (
                        fits,
                        limit - low,
                    )


def decide(problem: StrategyProblem) -> Claim:
    options = SolveOptions(time_limit=60, iteration_limit=10)
    return peak_prices.solve(problem, options, lambda _: None, lambda _: None)


def test_memory_prices_alone_are_never_wrong() -> None:
    proved = found = undecided = 0
    for seed in range(500):
        problem = random_problem(seed, "tiny")
        claim = decide(problem)
        feasible = bool(fitting(problem))
        assert not (claim.proved_infeasible and feasible), problem.name
        assert claim.choices is None or check(problem, claim.choices).ok, problem.name
        proved += claim.proved_infeasible
        found += claim.choices is not None
        undecided += claim.choices is None and not claim.proved_infeasible
    assert proved > 60
    assert found > 300
    assert undecided < 25


def test_local_search_says_feasible_only_where_that_is_so() -> None:
    seed_compiled(0)
    missed = feasible = 0
    for seed in range(300):
        problem = random_problem(seed, "tiny")
        flat = flatten(problem)
        if flat.contradiction or max(flat.rows.quantum, default=1) > 1:
            continue
        choices = np.zeros(len(problem.nodes), dtype=np.int64)
        weights = np.ones(len(flat.usage.limit)), np.ones(len(flat.graph.arity))
        costs = flat.unary, flat.tables, flat.penalty
        found = find_feasible(flat.graph, flat.usage, *costs, choices, *weights, 300)
        assert found == check(problem, flat.original_choices(choices)).ok, problem.name
        missed += not found and bool(fitting(problem))
        feasible += found
    assert missed == 0
    assert feasible > 150


def test_falling_limits_end_at_the_smallest_peak() -> None:
    for seed in range(80):
        problem = random_problem(seed, "tiny")
        if not problem.resources:
            continue
        resource = seed % len(problem.resources)
        unlimited = without_limit(problem, resource)
        low, high = peak_range(problem, resource)
        limits = [low if r == resource else limit.limit for r, limit in enumerate(problem.resources)]
        peaks = [check(unlimited, c).peaks[resource].usage for c in fitting(unlimited)]
        options = SolveOptions(time_limit=60, iteration_limit=20)
        claim = falling_limit.solve(with_limits(problem, limits), options, lambda _: None, lambda _: None, resource)
        assert (claim.choices is None) == (not peaks), problem.name
        if claim.choices is not None:
            report = check(unlimited, claim.choices)
            assert report.ok
            assert report.peaks[resource].usage >= min(peaks)
            if high < 2**40:
                assert report.peaks[resource].usage == min(peaks), problem.name


def test_memory_prices_decide_what_others_need_longer_for() -> None:
    problem = training_step_problem(2, operators=300, strategies=5)
    least = solve_in_process(problem, "peak_prices", SolveOptions(time_limit=60, iteration_limit=20))
    assert least.status is Status.FEASIBLE
    low, _ = peak_range(problem, 0)
    assert decide(with_limits(problem, [low - 1])).proved_infeasible


def test_memory_prices_confirm(pool: SolverPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "CONFIRMERS", ("peak_prices",))
    for name in ("highs", "cpsat"):
        assert solve(tight(10), name, OPTIONS, pool=pool).status is Status.INFEASIBLE


@pytest.mark.slow
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


@pytest.mark.slow
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
    enough = with_limits(problem, [2 * found.peak])  # a second search may end at a higher peak than the first
    assert "an assignment fits" in explain_infeasible(enough, SolveOptions(time_limit=1.5), pool)
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
    alone, together = text.split("; ")
    assert alone == (
        "both: each limit alone (device, host) can be met, but no assignment was found that meets all of them"
    )
    assert together in {f"limits that fit together are {fit}" for fit in ("device 5, host 2", "device 2, host 5")}
    looser = replace(problem, resources=(Resource("device", 2), Resource("host", 5)))
    assert solve(looser, "highs", OPTIONS, pool=pool).status is Status.OPTIMAL
