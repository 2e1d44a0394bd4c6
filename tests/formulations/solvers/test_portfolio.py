"""The portfolio: right against enumeration, deterministic, and not to be brought down by any of its members."""

from __future__ import annotations

import time

import numpy as np
import pytest
from support.problems.random_problems import random_problem, training_step_problem, with_limits
from support.tiers import slow

from formulations.encodings.flat import flatten, message_entries
from formulations.presolve import presolve
from formulations.problem.checker import check, check_result
from formulations.problem.solution import Progress, SolveOptions, SolveResult, Status
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers import (
    SOLVERS,
    SolveOptionsError,
    SolverContradiction,
    SolverPool,
    find_solver,
    solve,
    solve_in_process,
)
from formulations.solvers.huge_tables import core, price_and_branch
from formulations.solvers.prices.fixing import fix_by_reduced_cost
from formulations.solvers.processes.worker import Ending, Listener
from formulations.solvers.protocol.exchange import Update
from formulations.solvers.running import lanes as portfolio_lanes
from formulations.solvers.running import portfolio
from formulations.solvers.running.lanes import PROVING, Turn, lanes_for

FAKE = "support.problems.fake_solvers:"
PROBLEMS = 100
EXACT_UP_TO = 10**12


@pytest.fixture(scope="module")
def step() -> StrategyProblem:
    return training_step_problem(1, operators=80, strategies=5, memory=0.4)


def only(monkeypatch: pytest.MonkeyPatch, member: str) -> None:
    """Leave one member, a solver that misbehaves, and nothing for presolve to do."""
    monkeypatch.setattr(portfolio, "lanes_for", lambda problem, options, deep: ((Turn(FAKE + member),),))
    monkeypatch.setattr(portfolio, "lean_presolve", lambda problem, deadline: presolve(problem, ()))


def beside(monkeypatch: pytest.MonkeyPatch, member: str) -> None:
    """Put a solver that misbehaves in the place of memory prices, beside HiGHS."""
    monkeypatch.setattr(portfolio_lanes, "PRICES", FAKE + member)


def test_agrees_with_enumeration(pool: SolverPool) -> None:
    for seed in range(20_000, 20_000 + PROBLEMS):
        problem = random_problem(seed)
        optimum = solve_in_process(problem, "brute_force").objective
        result = solve(problem, "portfolio", SolveOptions(time_limit=20), pool=pool)
        assert optimum is not None or result.status is Status.INFEASIBLE, problem.name
        judge(problem, optimum, result)


def test_branches_on_what_prices_leave_open(pool: SolverPool) -> None:
    """Two price steps leave something for branch and cut to do on many of these."""
    branched = 0
    for seed in range(21_000, 21_000 + PROBLEMS):
        problem = random_problem(seed)
        optimum = solve_in_process(problem, "brute_force").objective
        result = solve(problem, "price_and_branch", SolveOptions(time_limit=20, iteration_limit=2), pool=pool)
        judge(problem, optimum, result)
        branched += "core of" in result.message
    assert branched >= 10


def test_goes_on_searching_where_the_core_stays_large(monkeypatch: pytest.MonkeyPatch, step: StrategyProblem) -> None:
    monkeypatch.setattr(core, "MOST_CORE_COLUMNS", -1)
    costs: list[int | None] = []
    options = SolveOptions(time_limit=3.0)
    claim = price_and_branch.solve(step, options, lambda _: None, lambda c: costs.append(check(step, c).objective))
    assert claim.choices is not None
    assert check(step, claim.choices, min(c for c in costs if c is not None), claim.bound).ok
    assert claim.bound == check(step, claim.choices).objective or "too many" in claim.message


def test_fixing_keeps_every_assignment_up_to_the_objective() -> None:
    rng = np.random.default_rng(0)
    removed = 0
    for seed in range(300):
        problem = random_problem(seed)
        best = solve_in_process(problem, "brute_force")
        flat = flatten(problem)
        if best.choices is None or flat.contradiction:
            continue
        prices = rng.uniform(0, 50, len(flat.usage.limit)) * (rng.random(len(flat.usage.limit)) < 0.5)
        messages = rng.uniform(-50, 50, message_entries(flat.graph))
        core = fix_by_reduced_cost(problem, flat, prices, messages, best.objective)
        assert check(core, best.choices, best.objective).ok, seed
        for node, smaller in zip(problem.nodes, core.nodes, strict=True):
            before = 0 if node.forbidden is None else int(node.forbidden.sum())
            removed += int(smaller.forbidden.sum()) - before
    assert removed > 50


def judge(problem: StrategyProblem, optimum: int | None, result: SolveResult) -> None:
    """True whatever the numbers' size, and optimal where doubles can tell."""
    where = f"{problem.name}, optimum {optimum}: {result}"
    assert check_result(problem, result).ok, where
    if optimum is None:
        assert result.choices is None, where
        return
    assert result.bound is not None, where
    assert result.bound <= optimum, where
    assert result.objective is not None, where
    assert result.objective >= optimum, where
    if sum(abs(int(table.cost.max())) for table in (*problem.nodes, *problem.factors)) <= EXACT_UP_TO:
        assert (result.status, result.objective) == (Status.OPTIMAL, optimum), where


def test_reports_progress_of_its_members(pool: SolverPool, step: StrategyProblem) -> None:
    seen: list[Progress] = []
    result = solve(step, "portfolio", SolveOptions(time_limit=30), seen.append, pool)
    assert result.status is Status.OPTIMAL
    assert result.solver == "portfolio"
    assert tuple(seen) == result.history
    assert {entry.source for entry in seen} <= {"lagrangian", "highs", "branch_and_bound", "portfolio"}
    assert {entry.source for entry in seen} & {"lagrangian", "highs", "branch_and_bound"}
    assert result.peak_rss_bytes > 10_000_000
    assert result.cpu_seconds > 0
    assert "presolve: 80 nodes" in result.message
    assert result.objective == solve(step, "highs", SolveOptions(time_limit=30), pool=pool).objective


def test_is_deterministic_with_an_iteration_limit(monkeypatch: pytest.MonkeyPatch, pool: SolverPool) -> None:
    problem = training_step_problem(9, operators=60, strategies=5, memory=0.15)
    options = SolveOptions(time_limit=60, iteration_limit=12, seed=3)
    first, second = (solve(problem, "portfolio", options, pool=pool) for _ in range(2))
    assert (first.choices, first.bound) == (second.choices, second.bound)
    monkeypatch.setattr(portfolio_lanes, "MOST_COLUMNS", 0)
    first, second = (solve(problem, "portfolio", options, pool=pool) for _ in range(2))
    assert (first.choices, first.bound) == (second.choices, second.bound)
    assert first.status in (Status.FEASIBLE, Status.OPTIMAL)


@pytest.mark.parametrize("columns", [portfolio_lanes.MOST_COLUMNS, slow(0)])
def test_one_worker_is_deterministic_without_an_iteration_limit(
    columns: int, monkeypatch: pytest.MonkeyPatch, pool: SolverPool
) -> None:
    monkeypatch.setattr(portfolio_lanes, "MOST_COLUMNS", columns)
    problem = training_step_problem(9, operators=60, strategies=5, memory=0.15)
    options = SolveOptions(time_limit=100, workers=1)
    first, second = (solve(problem, "portfolio", options, pool=pool) for _ in range(2))
    assert first.status is Status.OPTIMAL
    assert (first.choices, first.bound) == (second.choices, second.bound)


def test_more_workers_have_more_lanes_and_every_lane_ends_with_the_time(step: StrategyProblem) -> None:
    assert [len(lanes_for(step, SolveOptions(workers=workers))) for workers in (1, 2, 3, 4, 8)] == [1, 2, 3, 4, 4]
    for workers in (1, 2, 3, 4):
        for lane in lanes_for(step, SolveOptions(workers=workers)):
            # A turn that something feasible makes needless may share its time with the one after it.
            always = [turn.until for turn in lane if not turn.without_incumbent]
            assert always == sorted(always)
            assert always[-1] == 1.0
            # Exact members end by themselves.
            counted = [turn.iterations is not None for turn in lane if turn.solver not in PROVING]
            assert counted == [workers == 1] * len(counted)
            assert all(turn.iterations is None for turn in lane if turn.solver in PROVING)


def test_workers_are_counted(step: StrategyProblem) -> None:
    with pytest.raises(SolveOptionsError, match="workers is 0"):
        solve(step, "portfolio", SolveOptions(workers=0))


@pytest.mark.parametrize("member", ["crash", "fail"])
def test_a_member_that_dies_leaves_what_it_found(
    member: str, monkeypatch: pytest.MonkeyPatch, pool: SolverPool
) -> None:
    only(monkeypatch, member)
    free = with_limits(training_step_problem(2, operators=40), [10**13])
    result = solve(free, "portfolio", SolveOptions(time_limit=10), pool=pool)
    assert result.status is Status.FEASIBLE
    assert check(free, result.choices or (), result.objective).ok
    assert member in result.message


@pytest.mark.parametrize("member", ["crash", "fail", "wrong_assignment"])
def test_the_others_go_on(
    member: str, monkeypatch: pytest.MonkeyPatch, pool: SolverPool, step: StrategyProblem
) -> None:
    beside(monkeypatch, member)
    result = solve(step, "portfolio", SolveOptions(time_limit=30), pool=pool)
    assert result.status is Status.OPTIMAL
    assert check_result(step, result).ok


def test_a_member_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch, step: StrategyProblem) -> None:
    only(monkeypatch, "hang")
    begin = time.monotonic()
    result = solve(step, "portfolio", SolveOptions(time_limit=2))
    assert time.monotonic() - begin < 2 + 2
    assert result.status in (Status.NO_SOLUTION, Status.FEASIBLE)
    assert result.claimed is not None


def test_an_optimum_stops_a_member_that_hangs(
    monkeypatch: pytest.MonkeyPatch, pool: SolverPool, step: StrategyProblem
) -> None:
    beside(monkeypatch, "hang")
    result = solve(step, "portfolio", SolveOptions(time_limit=100), pool=pool)
    assert result.status is Status.OPTIMAL
    assert result.seconds < 50


@pytest.mark.parametrize(("member", "ends_all"), [("gives_up", False), ("claim_optimal", True)])
def test_only_a_claimed_optimum_ends_those_that_prove_nothing(
    member: str, ends_all: bool, monkeypatch: pytest.MonkeyPatch, pool: SolverPool
) -> None:
    lanes = (Turn(FAKE + member),), (Turn(FAKE + "slow_bound"),)
    monkeypatch.setattr(portfolio, "lanes_for", lambda problem, options, deep: lanes)
    monkeypatch.setattr(portfolio, "lean_presolve", lambda problem, deadline: presolve(problem, ()))
    free = with_limits(training_step_problem(2, operators=40), [10**13])
    result = solve(free, "portfolio", SolveOptions(time_limit=20), pool=pool)
    assert result.status is Status.FEASIBLE
    assert (FAKE + "slow_bound" not in {entry.source for entry in result.history}) == ends_all
    assert result.bound is None


def test_a_complete_search_has_found_the_optimum(pool: SolverPool) -> None:
    complete = 0
    for seed in range(24_000, 24_000 + PROBLEMS):
        problem = random_problem(seed)
        optimum = solve_in_process(problem, "brute_force").objective
        for name in ("cpsat", "highs"):
            claim = pool.run(find_solver(name), problem, SolveOptions(time_limit=20), Listener()).claim
            assert claim is not None
            if claim.complete and claim.choices is not None:
                complete += 1
                assert check(problem, claim.choices).objective == optimum, (seed, name)
    assert complete > PROBLEMS


def test_a_wrong_claim_does_not_count(monkeypatch: pytest.MonkeyPatch, pool: SolverPool) -> None:
    beside(monkeypatch, "wrong_bound")
    large = training_step_problem(1, operators=300)  # a small one may be proved before the other has reported
    result = solve(large, "portfolio", SolveOptions(time_limit=5), pool=pool)
    assert "its claims do not count" in result.message
    assert result.claimed is None or result.claimed <= (result.objective or 0)
    only(monkeypatch, "wrong_infeasible")
    tiny = random_problem(3, "tiny")
    result = solve(tiny, "portfolio", SolveOptions(time_limit=30), pool=pool)
    assert result.status is Status.FEASIBLE
    assert "claims that nothing is feasible, but" in result.message


def test_a_wrong_proof_is_a_contradiction(monkeypatch: pytest.MonkeyPatch, pool: SolverPool) -> None:
    only(monkeypatch, "wrong_bound")
    monkeypatch.setitem(SOLVERS, FAKE + "wrong_bound", FAKE + "wrong_bound")  # a solver of our own, of exact bounds
    free = with_limits(training_step_problem(2, operators=40), [10**13])
    with pytest.raises(SolverContradiction, match="lower bound"):
        solve(free, "portfolio", SolveOptions(time_limit=30), pool=pool)


def test_interrupted_it_returns_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "interrupt_parent")
    free = with_limits(training_step_problem(2, operators=40), [10**13])
    result = solve(free, "portfolio", SolveOptions(time_limit=60))
    assert result.status is Status.FEASIBLE
    assert "interrupted" in result.message
    assert result.seconds < 30


def test_a_start_that_is_better_is_kept(
    monkeypatch: pytest.MonkeyPatch, pool: SolverPool, step: StrategyProblem
) -> None:
    best = solve(step, "portfolio", SolveOptions(time_limit=30), pool=pool)
    only(monkeypatch, "hang")
    result = solve(step, "portfolio", SolveOptions(time_limit=1, initial_choices=best.choices), pool=pool)
    assert result.objective == best.objective


def test_members_hear_of_each_other(pool: SolverPool, step: StrategyProblem) -> None:
    best = solve(step, "highs", SolveOptions(time_limit=30), pool=pool)
    assert best.choices is not None
    updates = [Update(choices=best.choices)]
    listener = Listener(from_others=lambda: updates.pop() if updates else None)
    outcome = pool.run(find_solver(FAKE + "listen"), step, SolveOptions(time_limit=20), listener)
    assert outcome.claim is not None
    assert outcome.claim.choices == best.choices
    found: list[tuple[int, ...]] = []
    told = SolveOptions(time_limit=30, initial_choices=best.choices)
    pool.run(find_solver(FAKE + "highs_told"), step, told, Listener(on_incumbents=found.extend))
    assert found[0] == best.choices


def test_members_hear_each_others_bounds(monkeypatch: pytest.MonkeyPatch, pool: SolverPool) -> None:
    """In one lane, the next member knows at once; beside each other, as soon as there is something to tell."""
    problem = training_step_problem(1, operators=80)
    monkeypatch.setattr(portfolio, "lean_presolve", lambda problem, deadline: presolve(problem, ()))
    listener, prices = Turn(FAKE + "listen_for_bound"), Turn("lagrangian", iterations=5)
    for lanes in (((prices, listener),), ((listener,), (prices,))):
        monkeypatch.setattr(portfolio, "lanes_for", lambda problem, options, deep, lanes=lanes: lanes)
        result = solve(problem, "portfolio", SolveOptions(time_limit=60), pool=pool)
        heard = int(result.message.partition("heard ")[2].partition(";")[0])
        assert result.bound is not None
        assert 0 < heard <= result.bound


def test_a_job_can_be_stopped(pool: SolverPool, step: StrategyProblem) -> None:
    listener = Listener(should_stop=lambda: True)
    outcome = pool.run(find_solver(FAKE + "hang"), step, SolveOptions(time_limit=60), listener)
    assert outcome.ending is Ending.STOPPED


@pytest.mark.parametrize("solver", ["portfolio", FAKE + "listen"])
def test_what_is_found_elsewhere_is_told_to_solvers(
    solver: str, monkeypatch: pytest.MonkeyPatch, pool: SolverPool, step: StrategyProblem
) -> None:
    """The only member ends as soon as it hears something, and not before."""
    best = solve(step, "highs", SolveOptions(time_limit=30), pool=pool)
    updates = [best.choices]
    only(monkeypatch, "listen")
    options = SolveOptions(time_limit=60)
    result = solve(step, solver, options, pool=pool, from_others=lambda: updates.pop() if updates else None)
    assert result.choices == best.choices
    assert result.seconds < 30


@pytest.mark.parametrize("solver", ["portfolio", FAKE + "hang"])
def test_what_is_found_elsewhere_is_checked_and_stays(
    solver: str, monkeypatch: pytest.MonkeyPatch, pool: SolverPool, step: StrategyProblem
) -> None:
    """Whatever the solver does; an assignment over the limits is neither passed on nor kept."""
    best = solve(step, "highs", SolveOptions(time_limit=30), pool=pool)
    over = tuple(int(node.cost.argmin()) for node in step.nodes)
    assert not check(step, over).ok
    updates = [best.choices, over]
    only(monkeypatch, "hang")
    options = SolveOptions(time_limit=2)
    result = solve(step, solver, options, pool=pool, from_others=lambda: updates.pop() if updates else None)
    assert result.choices == best.choices
    assert "others offered an assignment that does not hold" in result.message


def test_a_solve_that_is_told_to_stop_ends_with_the_best_so_far(
    monkeypatch: pytest.MonkeyPatch, pool: SolverPool, step: StrategyProblem
) -> None:
    """With an hour to go it would outlast this test's own limit."""
    only(monkeypatch, "hang")
    known = solve(step, "greedy", SolveOptions(time_limit=30), pool=pool)
    options = SolveOptions(time_limit=3600, initial_choices=known.choices)
    assert solve(step, "portfolio", options, pool=pool, should_stop=lambda: True).objective == known.objective


def test_needs_processes() -> None:
    with pytest.raises(SolveOptionsError, match="process of its own"):
        solve_in_process(random_problem(0), "portfolio")
