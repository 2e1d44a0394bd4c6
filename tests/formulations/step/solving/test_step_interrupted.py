"""After Ctrl-C nothing else is begun: the best decision so far is returned, and without one the interrupt goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.steps.random_steps import random_step

from formulations.problem.solution import SolveOptions, SolveResult, Status
from formulations.solvers import solve
from formulations.solvers.peaks import minimum_peak as peaks
from formulations.solvers.peaks.minimum_peak import minimum_peak
from formulations.step.replay import replay_decision
from formulations.step.sharding import MEMORY
from formulations.step.solving import beside, driver, without_limit
from formulations.step.solving.context import Executed, SolveContext
from formulations.step.solving.driver import solve_step
from formulations.step.solving.registry import kiwi_reduced_problem
from formulations.step.training_step import StepModel

LIMIT = SolveOptions(time_limit=60.0, workers=1)
SEED = 3


def context_of(model: StepModel, pool) -> SolveContext:
    def execute(decision):
        replay = replay_decision(model, decision)
        return Executed(replay.cost, replay.peak)

    return SolveContext(execute, "brute_force", LIMIT, pool)


@pytest.fixture
def interrupt(monkeypatch) -> Callable[..., list[str]]:
    """Let a solve of the stages, counted from 0, end by Ctrl-C, and return the names of all problems solved."""

    def prepare(at: int, *, with_choices: bool) -> list[str]:
        solved: list[str] = []

        def interrupted(problem, solver, options=None, progress=None, pool=None, *others, **named) -> SolveResult:
            solved.append(problem.name)
            found = solve(problem, solver, options, progress, pool)
            if len(solved) <= at:
                return found
            if with_choices:
                return replace(found, status=Status.FEASIBLE, message="interrupted")
            return replace(found, status=Status.NO_SOLUTION, choices=None, objective=None, message="interrupted")

        for module in (beside, driver, without_limit):
            monkeypatch.setattr(module, "solve", interrupted)
        monkeypatch.setattr(driver, "minimum_peak", lambda *_: pytest.fail("the smallest peak is not looked for"))
        return solved

    return prepare


def tight(model: StepModel) -> int:
    """A limit that the best layouts without one exceed."""
    built = kiwi_reduced_problem(model, None)
    found = solve(built.problem, "brute_force", LIMIT)
    assert found.choices is not None
    return replay_decision(model, built.decode(found.choices)).peak - 1


def test_an_interrupt_before_anything_is_found_goes_on(pool, interrupt) -> None:
    model = random_step(SEED)
    solved = interrupt(0, with_choices=False)
    with pytest.raises(KeyboardInterrupt):
        solve_step(kiwi_reduced_problem(model, tight(model)), context_of(model, pool))
    assert len(solved) == 1


def test_an_interrupt_while_a_beginning_is_sought_returns_what_is_known(pool, interrupt) -> None:
    model = random_step(SEED)
    free = kiwi_reduced_problem(model, None)
    found = solve(free.problem, "brute_force", LIMIT, pool=pool)
    known = free.decode(found.choices)
    limit = replay_decision(model, known).peak
    solved = interrupt(0, with_choices=False)
    context = replace(context_of(model, pool), known=(known,))
    result = solve_step(kiwi_reduced_problem(model, limit), context)
    assert len(solved) == 1
    assert result.decision == known
    assert result.result.message == "interrupted"


def press(*_: object) -> None:
    """Ctrl-C at this call."""
    raise KeyboardInterrupt


@pytest.mark.parametrize("place", ["solve_or_smallest_peak", "run_stages"])
def test_an_interrupt_between_solves_returns_what_is_known(pool, monkeypatch, place: str) -> None:
    """Signals also come while this process builds a problem or checks a start."""
    model = random_step(SEED)
    free = kiwi_reduced_problem(model, None)
    known = free.decode(solve(free.problem, "brute_force", LIMIT, pool=pool).choices)
    limit = replay_decision(model, known).peak
    monkeypatch.setattr(driver, "solve_without_limit", lambda *_: None)
    monkeypatch.setattr(driver, place, press)
    context = replace(context_of(model, pool), known=(known,))
    result = solve_step(kiwi_reduced_problem(model, limit), context)
    assert result.decision == known
    assert result.result.message == "interrupted"
    assert context.interrupted.is_set()


def test_an_interrupt_between_solves_with_nothing_known_goes_on(pool, monkeypatch) -> None:
    model = random_step(SEED)
    monkeypatch.setattr(driver, "solve_or_smallest_peak", press)
    with pytest.raises(KeyboardInterrupt):
        solve_step(kiwi_reduced_problem(model, tight(model)), context_of(model, pool))


def test_an_interrupt_with_a_decision_returns_it(pool, interrupt) -> None:
    model = random_step(SEED)
    solved = interrupt(0, with_choices=True)
    result = solve_step(kiwi_reduced_problem(model, 2**40), context_of(model, pool))
    assert len(solved) == 1
    assert "interrupted" in result.result.message
    assert result.result.objective == replay_decision(model, result.decision).cost


def test_an_interrupted_search_for_the_smallest_peak_begins_no_other_part(pool, monkeypatch) -> None:
    begun: list[str] = []

    def interrupted(problem, solver, options, pool) -> SolveResult:
        begun.append(solver)
        found = solve(problem, solver, options, pool=pool)
        return replace(found, choices=None, bound=None, claimed=None, status=Status.NO_SOLUTION, message="interrupted")

    monkeypatch.setattr(peaks, "solve", interrupted)
    problem = kiwi_reduced_problem(random_step(SEED), 10).problem
    found = minimum_peak(problem, MEMORY, LIMIT, pool)
    assert len(begun) == 1
    assert (found.peak, found.message) == (None, "interrupted")
