"""The bound beside the search is one on the relaxation, begins when it may, and never outlives the search."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from concurrent.futures import wait as futures_wait
from dataclasses import replace

import pytest

from formulations.instances.random_families import family_problem
from formulations.problem.solution import KnownBound, Proof, SolveOptions, Status
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers import solve, solve_in_process
from formulations.solvers.protocol.registry import method_of
from formulations.step.solving import bound as step_bound
from formulations.step.solving.bound import ALONE_SHARE, BoundBeside

BESIDE = SolveOptions(time_limit=20.0, workers=2)
AFTER = replace(BESIDE, workers=1)
FAR_ABOVE = 10**15


class Relaxed:
    """Makes a problem and remembers for which costs."""

    def __init__(self, problem: StrategyProblem) -> None:
        self.problem, self.costs, self.made = problem, list[int](), threading.Event()

    def __call__(self, cost: int) -> StrategyProblem:
        self.costs.append(cost)
        self.made.set()
        return self.problem


def wait_until_known(beside: BoundBeside, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have enough, by Ctrl-C, of waiting for a better bound as soon as there is any, however long that takes."""

    def wait(futures: list[Future[object]], timeout: float) -> None:
        if beside._known:
            raise KeyboardInterrupt
        futures_wait(futures, timeout)

    monkeypatch.setattr(step_bound, "_LEAST_PATIENCE", 60.0)
    monkeypatch.setattr(step_bound, "wait", wait)


@pytest.mark.slow_cases("options0")
@pytest.mark.parametrize("options", [replace(BESIDE, time_limit=60.0), replace(AFTER, time_limit=60.0)])
def test_it_is_at_most_the_optimum_and_at_most_the_cost(options, pool, monkeypatch):
    problem = family_problem("cliques", "small")
    optimum = solve(problem, "highs", options, None, pool).objective
    assert optimum is not None
    for cost in (optimum, FAR_ABOVE):
        relaxed = Relaxed(problem)
        with BoundBeside(relaxed, options, pool) as beside:
            wait_until_known(beside, monkeypatch)
            beside.begin(FAR_ABOVE)
            found = beside.bound(cost)
        assert found is not None
        assert found.proof is Proof.EXACT
        assert method_of(found.by) == "prices"
        assert 0 < found.value <= min(optimum, cost)
        assert len(relaxed.costs) == 1


def test_it_begins_with_the_first_plan_and_once(pool):
    relaxed = Relaxed(family_problem("cliques", "small"))
    with BoundBeside(relaxed, BESIDE, pool) as beside:
        assert beside.search_seconds == BESIDE.time_limit
        beside.begin(30)
        assert relaxed.made.wait(60.0)
        beside.begin(20)
        beside.bound(10)
    assert relaxed.costs == [30]


def test_where_one_process_may_be_at_work_it_comes_after_the_search(pool):
    relaxed = Relaxed(family_problem("cliques", "small"))
    with BoundBeside(relaxed, AFTER, pool) as beside:
        assert beside.search_seconds == pytest.approx((1.0 - ALONE_SHARE) * AFTER.time_limit)
        beside.begin(30)
        assert not relaxed.costs
        beside.bound(20)
    assert relaxed.costs == [20]


@pytest.mark.parametrize("options", [BESIDE, AFTER])
def test_where_too_little_time_is_left_it_does_not_begin(options, pool):
    relaxed = Relaxed(family_problem("cliques", "small"))
    with BoundBeside(relaxed, options, pool, least_seconds=options.time_limit + 1.0) as beside:
        assert beside.search_seconds == options.time_limit
        beside.begin(30)
        assert beside.bound(20) is None
    assert not relaxed.costs


@pytest.mark.parametrize("asked", [True, False])
def test_it_lets_others_work_before_unless_it_is_asked_for(asked, pool, monkeypatch):
    monkeypatch.setattr(step_bound, "_LEAST_PATIENCE", 60.0)  # a loaded machine takes long to start a worker
    relaxed = Relaxed(family_problem("cliques", "small"))
    with BoundBeside(relaxed, BESIDE, pool, after=0.5 if asked else 0.01) as beside:
        beside.begin(30)
        if asked:
            assert not relaxed.costs
            assert beside.bound(30) is not None
        else:
            assert relaxed.made.wait(60.0)
    assert relaxed.costs == [30]


def test_it_need_not_begin_at_all(pool):
    """With an hour to wait before it would outlast this test's own limit."""
    relaxed = Relaxed(family_problem("cliques", "small"))
    with BoundBeside(relaxed, replace(BESIDE, time_limit=3600.0), pool, after=1.0) as beside:
        beside.begin(30)
    assert not relaxed.costs


@pytest.mark.parametrize(("status", "proved"), [(Status.INFEASIBLE, None), (Status.BOUND_ONLY, 40)])
@pytest.mark.parametrize(("cost", "bound"), [(20, 20), (30, 30), (31, 31), (50, 31)])
def test_it_says_nothing_about_plans_that_the_relaxation_leaves_out(status, proved, cost, bound, monkeypatch):
    """It was made for plans of at most 30, where there turned out to be none: others may cost 31."""
    problem = family_problem("cliques", "small")
    result = replace(
        solve_in_process(problem, "greedy"), status=status, bound=proved, proof=Proof.EXACT, proved_by="greedy"
    )
    monkeypatch.setattr(step_bound, "solve", lambda *_: result)
    with BoundBeside(Relaxed(problem), BESIDE, None) as beside:
        beside.begin(30)
        assert beside.bound(cost) == KnownBound(bound, Proof.EXACT, "greedy")


def test_without_a_relaxation_there_is_no_bound():
    with BoundBeside(None, AFTER, None) as beside:
        assert beside.search_seconds == AFTER.time_limit
        beside.begin(30)
        assert beside.bound(20) is None


def test_what_goes_wrong_is_told_where_the_bound_is_asked_for(pool):
    def relaxed(cost: int) -> StrategyProblem:
        raise ArithmeticError(f"no relaxation for {cost}")

    with BoundBeside(relaxed, BESIDE, pool) as beside:
        beside.begin(30)
        with pytest.raises(ArithmeticError, match="no relaxation for 30"):
            beside.bound(20)


@pytest.mark.parametrize("asked", [True, False])
def test_it_ends_when_nobody_waits_for_it(asked, pool):
    """With an hour to go it would outlast this test's own limit."""
    relaxed = Relaxed(family_problem("cliques", "large"))
    with BoundBeside(relaxed, replace(BESIDE, time_limit=3600.0), pool) as beside:
        beside.begin(FAR_ABOVE)
        assert relaxed.made.wait(60.0)
        if asked:
            bound = beside.bound(FAR_ABOVE, patient=False)
            assert bound is None or bound.value <= FAR_ABOVE


def test_ctrl_c_ends_the_waiting_and_keeps_what_is_known(pool, monkeypatch):
    def interrupt(futures, timeout):
        raise KeyboardInterrupt

    monkeypatch.setattr(step_bound, "wait", interrupt)
    relaxed = Relaxed(family_problem("cliques", "large"))
    with BoundBeside(relaxed, replace(BESIDE, time_limit=3600.0), pool) as beside:
        bound = beside.bound(FAR_ABOVE)
    assert bound is None or bound.value <= FAR_ABOVE
    assert relaxed.costs == [FAR_ABOVE]
