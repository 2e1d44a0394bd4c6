"""Solving in rounds finds the optimum, says so, and reports time and bounds of both rounds."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.problems.tight_problems import tight_problem

from formulations.problem.checker import check, check_result
from formulations.problem.solution import Progress, SolveOptions, Status
from formulations.solvers import SolverPool, solve, solve_in_process
from formulations.step.solving import probing as step_probing
from formulations.step.solving.probing import solve_in_rounds

OPTIONS = SolveOptions(time_limit=20.0, workers=1)


@pytest.fixture(scope="module")
def pool() -> Iterator[SolverPool]:
    with SolverPool() as pool:
        yield pool


@pytest.fixture(autouse=True)
def small_problems_too(monkeypatch):
    monkeypatch.setattr(step_probing, "LEAST_ENTRIES", 0)


@pytest.mark.parametrize("seed", range(5))
def test_rounds_end_at_the_optimum(seed, pool):
    problem = tight_problem(seed)
    best = solve_in_process(problem, "brute_force")
    found = solve_in_rounds(problem, "portfolio", OPTIONS, None, pool)
    assert found.objective == best.objective
    assert (found.choices is None) == (best.choices is None)
    assert check_result(problem, found).ok
    again = solve_in_rounds(
        problem, "portfolio", SolveOptions(time_limit=20.0, workers=1, initial_choices=best.choices), None, pool
    )
    assert again.objective == best.objective


def test_a_second_round_begins_from_the_first_and_keeps_its_bound(monkeypatch):
    problem = next(p for p in map(tight_problem, range(100)) if solve_in_process(p, "brute_force").choices)
    optimum = solve_in_process(problem, "brute_force")
    begun = []

    def pretending(problem, solver, options, progress, pool):
        """Finds the optimum, and proves less from round to round."""
        begun.append(options.initial_choices)
        result = solve(problem, "brute_force", SolveOptions())
        bound = optimum.objective - len(begun)
        progress(Progress(0.0, result.objective, bound, "pretending"))
        return step_probing.replace(result, status=Status.FEASIBLE, bound=bound)

    monkeypatch.setattr(step_probing, "solve", pretending)
    lines: list[Progress] = []
    found = solve_in_rounds(problem, "portfolio", OPTIONS, lines.append)
    assert begun == [None, found.choices]
    assert check(problem, found.choices).objective == optimum.objective
    assert found.bound == optimum.objective - 1
    assert [line.bound for line in lines] == [optimum.objective - 1] * 2
    assert lines[0].seconds <= lines[1].seconds


@pytest.mark.parametrize("changes", [{"solver": "greedy"}, {"iterations": 5}, {"seconds": 1.0}])
def test_where_probing_does_not_pay_the_problem_is_solved_as_it_is(changes, monkeypatch):
    problem, seen = tight_problem(1), []
    monkeypatch.setattr(step_probing, "solve", lambda problem, *_: seen.append(problem))
    options = SolveOptions(time_limit=changes.get("seconds", 20.0), iteration_limit=changes.get("iterations"))
    solve_in_rounds(problem, changes.get("solver", "portfolio"), options)
    assert seen[0] is problem
    assert len(seen) == 1


@pytest.mark.parametrize("while_probing", [True, False])
def test_an_interrupt_ends_the_rounds_with_what_is_known(while_probing, monkeypatch):
    problem = next(p for p in map(tight_problem, range(100)) if solve_in_process(p, "brute_force").choices)
    rounds, whole = [], step_probing.forbid_above

    def interrupted(problem, objective, seconds):
        if while_probing and rounds:
            raise KeyboardInterrupt
        return whole(problem, objective, seconds)

    def pretending(problem, *_):
        rounds.append(problem)
        message = "" if while_probing else "presolve; interrupted"
        return step_probing.replace(solve(problem, "brute_force"), status=Status.FEASIBLE, bound=None, message=message)

    monkeypatch.setattr(step_probing, "forbid_above", interrupted)
    monkeypatch.setattr(step_probing, "solve", pretending)
    found = solve_in_rounds(problem, "portfolio", OPTIONS)
    assert len(rounds) == 1
    assert check(problem, found.choices).ok


def test_interrupted_at_the_very_beginning_the_start_is_kept(monkeypatch, pool):
    problem = next(p for p in map(tight_problem, range(100)) if solve_in_process(p, "brute_force").choices)
    start = solve_in_process(problem, "brute_force").choices

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(step_probing, "forbid_above", interrupted)
    options = step_probing.replace(OPTIONS, initial_choices=start)
    assert check(problem, solve_in_rounds(problem, "portfolio", options, None, pool).choices).ok
