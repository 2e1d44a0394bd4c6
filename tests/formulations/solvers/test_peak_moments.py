"""What single moments need at least, against enumeration."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import numpy as np
import pytest
from support.problems.random_problems import random_problem

from formulations.problem.checker import check
from formulations.problem.solution import SolveOptions
from formulations.problem.strategy_problem import Factor, Node, Resource, StrategyProblem, UsageTerm
from formulations.solvers import SolverPool, minimum_peak
from formulations.solvers.peaks.limit_problem import peak_range
from formulations.solvers.peaks.minimum_peak import without_limit
from formulations.solvers.peaks.moments import busiest_moments, moment_problem


def assignments(problem: StrategyProblem) -> Iterator[tuple[int, ...]]:
    return itertools.product(*(range(node.size) for node in problem.nodes))


def problem_with_resources(seed: int) -> StrategyProblem:
    """The first of several random problems that counts something."""
    drawn = (random_problem(seed + 1000 * attempt, "tiny") for attempt in itertools.count())
    return next(problem for problem in drawn if problem.resources)


def usage_at(problem: StrategyProblem, resource: int, choices: tuple[int, ...], time: int) -> int:
    terms = (pair for pair in problem.usage_terms() if pair[1].resource == resource)
    return sum(int(t.amount[tuple(choices[i] for i in scope)]) for scope, t in terms if t.start <= time < t.end)


@pytest.mark.parametrize("seed", range(60))
def test_cost_at_a_moment_is_usage_and_the_least_is_below_every_peak(seed: int) -> None:
    problem = problem_with_resources(seed)
    resource = seed % len(problem.resources)
    unlimited = without_limit(problem, resource)
    for time in range(problem.horizon):
        moment = moment_problem(problem, resource, time)
        moment.validate()
        for choices in assignments(problem):
            expected, found = check(unlimited, choices), check(moment, choices)
            assert found.objective is None or found.objective == usage_at(problem, resource, choices, time)
            assert found.ok or not expected.ok
            if expected.ok:
                assert found.objective is not None
                assert found.objective <= expected.peaks[resource].usage


@pytest.mark.parametrize("seed", range(60))
def test_busiest_moments_begin_with_the_peak(seed: int) -> None:
    problem = problem_with_resources(seed)
    resource = seed % len(problem.resources)
    least = busiest_moments(problem, resource, None)
    for choices in itertools.islice(assignments(problem), 40):
        moments = busiest_moments(problem, resource, choices)
        usages = [usage_at(problem, resource, choices, time) for time in range(problem.horizon)]
        assert all(usages[time] == usage for usage, time in moments)
        assert max((usage for usage, _ in moments), default=0) == max(usages, default=0)
        assert moments == sorted(moments, key=lambda moment: (-moment[0], moment[1]))
        assert all(usage <= usages[time] for usage, time in least)


def long_weights(steps: int, pairs: int) -> StrategyProblem:
    """At every step a value that is large where its neighbour is small: only one step has to hold two large ones."""
    rng = np.random.default_rng(steps)
    nodes, factors = [], []
    for k in range(steps):
        amount = rng.integers(1, 50, pairs)
        nodes.append(Node(f"n{k}", np.zeros(pairs, np.int64), None, (UsageTerm(0, k, k + 2, amount),)))
        if k:
            flags = rng.random((pairs, pairs)) < 0.4
            flags[rng.integers(pairs), :] = False
            factors.append(Factor((k - 1, k), np.zeros((pairs, pairs), np.int64), flags))
    return StrategyProblem("long", tuple(nodes), tuple(factors), (Resource("memory", None),), steps + 1)


@pytest.mark.parametrize("steps", range(3, 7))
def test_the_smallest_peak_is_never_below_a_moment(steps: int, pool: SolverPool) -> None:
    problem = long_weights(steps, 4)
    feasible = [choices for choices in assignments(problem) if check(problem, choices).ok]
    truth = min(check(problem, choices).peaks[0].usage for choices in feasible)
    least = [min(usage_at(problem, 0, choices, time) for choices in feasible) for time in range(problem.horizon)]
    found = minimum_peak(problem, 0, SolveOptions(time_limit=20.0), pool)
    assert max(least) <= truth == found.peak == found.bound


def test_moments_alone_bound_from_below(pool: SolverPool, monkeypatch: pytest.MonkeyPatch) -> None:
    search = sys.modules["formulations.solvers.peaks.minimum_peak"]._PeakSearch
    monkeypatch.setattr(search, "_look", lambda self, seconds: None)
    monkeypatch.setattr(search, "_search", lambda self, seconds: None)
    raised = exact = 0
    for seed in range(60):
        problem = random_problem(seed, "tiny")
        if not problem.resources:
            continue
        resource = seed % len(problem.resources)
        unlimited = without_limit(problem, resource)
        feasible = [choices for choices in assignments(problem) if check(unlimited, choices).ok]
        peaks = {choices: check(unlimited, choices).peaks[resource].usage for choices in feasible}
        starts = [None] if not feasible else [None, max(peaks, key=peaks.__getitem__)]
        for start in starts:
            options = SolveOptions(time_limit=5.0, initial_choices=start)
            found = minimum_peak(problem, resource, options, pool)
            assert found.infeasible <= (not feasible), seed
            if feasible:
                truth = min(peaks.values())
                assert found.bound <= truth, seed
                assert found.peak is None or found.peak >= truth, seed
                raised += found.bound > peak_range(problem, resource)[0]
                exact += found.bound == truth
    assert raised > 10
    assert exact > 60
