"""What solvers tell each other: for whom it is meant, what it means there, and that it makes nobody wrong."""

from __future__ import annotations

import pytest
from support.problems.random_problems import random_problem, training_step_problem

from formulations.problem.checker import check
from formulations.problem.solution import SolveOptions, Status
from formulations.solvers import SolverPool, find_solver, solve, solve_in_process
from formulations.solvers.prices import lagrangian
from formulations.solvers.processes.worker import Listener
from formulations.solvers.protocol.exchange import EXCHANGE, IncumbentExchange, Update

LISTENERS = ("highs", "cpsat", "lagrangian", "price_and_branch", "large_neighbourhood", "hub_branching")
PROBLEMS = 12


def _told(bound: int) -> Listener:
    updates = [Update(bound=bound)]
    return Listener(from_others=lambda: updates.pop() if updates else None)


def test_an_assignment_is_taken_once_and_a_bound_stays() -> None:
    box, whole = IncumbentExchange(), random_problem(0)
    box.publish(Update(choices=(1, 2)))
    box.publish(Update(bound=7))
    with box.subscribed_to(whole):
        assert (box.take(whole), box.take(whole)) == ((1, 2), None)
        assert (box.bound(whole), box.bound(whole)) == (7, 7)
        box.empty()
        assert box.bound(whole) is None


def test_news_are_for_one_problem() -> None:
    box, whole, core, kernel = IncumbentExchange(), random_problem(0), random_problem(1), random_problem(2)
    box.publish(Update((3, 4, 5), 100))
    assert (box.take(whole), box.bound(whole)) == (None, None)
    with box.subscribed_to(whole):
        assert (box.take(core), box.bound(core)) == (None, None)
        with (
            box.translated(core, lambda choices: choices[1:], 30),
            box.translated(kernel, lambda choices: choices[1:], 9),
        ):
            assert (box.take(whole), box.take(core), box.bound(core)) == (None, None, None)
            assert (box.take(kernel), box.bound(kernel)) == ((5,), 61)
        box.publish(Update(choices=(3, 4, 5)))
        with box.translated(core, lambda choices: None, 0):
            assert (box.take(core), box.bound(core)) == (None, 100)
        assert box.bound(whole) == 100
    with box.translated(core, lambda choices: choices, 0):
        assert box.bound(core) is None


@pytest.mark.parametrize("solver", LISTENERS)
def test_a_bound_of_others_makes_nobody_wrong(solver: str, pool: SolverPool) -> None:
    for seed in range(41_000, 41_000 + PROBLEMS):
        problem = random_problem(seed)
        best = solve_in_process(problem, "brute_force")
        told = _told(0 if best.objective is None else best.objective)
        options = SolveOptions(time_limit=60.0, iteration_limit=20, seed=seed)
        claim = pool.run(find_solver(solver), problem, options, told).claim
        assert claim is not None
        if best.objective is None:
            assert claim.choices is None
            continue
        assert not claim.proved_infeasible
        assert claim.bound is None or claim.bound <= best.objective
        if claim.choices is not None:
            objective = check(problem, claim.choices).objective
            assert objective is not None
            assert objective >= best.objective
            assert objective == best.objective or solver not in ("highs", "cpsat")


def test_cpsat_shows_infeasibility_without_help(pool: SolverPool) -> None:
    seeds = [s for s in range(42_000, 42_400) if solve_in_process(random_problem(s), "brute_force").objective is None]
    for seed in seeds[:5]:
        claim = pool.run(find_solver("cpsat"), random_problem(seed), SolveOptions(time_limit=60.0), _told(3)).claim
        assert claim is not None
        assert claim.proved_infeasible
    # A bound that nothing meets is somebody's mistake, and no proof that nothing is feasible.
    problem = random_problem(41_000)
    claim = pool.run(find_solver("cpsat"), problem, SolveOptions(time_limit=60.0), _told(10**15)).claim
    assert claim is not None
    assert claim.choices is not None


def test_prices_stop_at_a_bound_of_others() -> None:
    problem = training_step_problem(1, operators=80, strategies=5, memory=0.4)
    best = solve(problem, "highs", SolveOptions(time_limit=60.0))
    assert best.status is Status.OPTIMAL
    assert best.objective is not None
    options = SolveOptions(time_limit=120.0, iteration_limit=40, initial_choices=best.choices)
    alone = lagrangian.solve(problem, options, _ignore, _ignore)
    EXCHANGE.publish(Update(bound=best.objective))
    with EXCHANGE.subscribed_to(problem):
        told = lagrangian.solve(problem, options, _ignore, _ignore)
    EXCHANGE.empty()
    assert told.iterations < alone.iterations
    assert told.bound is not None
    assert told.bound <= best.objective  # it claims what it proved itself
    assert told.choices is not None
    assert check(problem, told.choices).objective == best.objective


def _ignore(_: object) -> None:
    return
