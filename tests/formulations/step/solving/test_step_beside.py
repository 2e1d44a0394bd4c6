"""Smaller problems beside a larger one: what comes out is no dearer than either, and nothing outlives the solve."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import count

import pytest
from support.steps.random_steps import random_step
from support.tiers import first

from formulations.instances.random_families import family_problem
from formulations.problem.solution import Progress, SolveOptions, SolveResult, Status
from formulations.solvers import DEFAULT_SOLVER, SolverContradiction, SolverPool, solve, solve_in_process
from formulations.solvers.peaks.minimum_peak import minimum_peak
from formulations.step.kiwi_chain import chain_moments, latest_moments
from formulations.step.offload.model import Links
from formulations.step.replay import replay_decision
from formulations.step.sharding import MEMORY
from formulations.step.solving import beside as step_beside
from formulations.step.solving import driver
from formulations.step.solving.beside import Patience, RestrictionsBeside, solve_with_restrictions
from formulations.step.solving.context import Candidate, Executed, SolveContext
from formulations.step.solving.driver import solve_or_smallest_peak, solve_step
from formulations.step.solving.registry import kiwi_chain_problem, kiwi_offload_problem
from formulations.step.solving.solved import SolvedStep
from formulations.step.solving.step_problem import StepProblem
from formulations.step.training_step import StepDecision, StepModel

BESIDE = SolveOptions(time_limit=60.0, workers=3)
BEFORE = replace(BESIDE, workers=1)
ENDLESS = 3600.0
AT_ONCE, IN_ALL = 2, 4
"""Seeds in `make test` and in `make test-all`."""


def some_of(seeds: int) -> list[object]:
    """The first few seeds, and the others at length."""
    return [*first(AT_ONCE, range(IN_ALL)), *(pytest.param(k, marks=pytest.mark.fuzz) for k in range(IN_ALL, seeds))]


@pytest.fixture(autouse=True)
def deep(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take every problem for that of a deep model."""
    monkeypatch.setattr(SolveContext, "solves_by_patterns", lambda self, problem: True)


def execution(model: StepModel) -> Callable[[StepDecision], Executed]:
    def execute(decision: StepDecision) -> Executed:
        replay = replay_decision(model, decision)
        return Executed(replay.cost, replay.peak)

    return execute


def optimum(built: StepProblem) -> Candidate | None:
    """The best decision of a problem, by enumeration."""
    found = solve_in_process(built.problem, "brute_force", BEFORE)
    if found.choices is None:
        return None
    assert found.objective is not None
    return Candidate(built.decode(found.choices), Executed(found.objective, 0))


@cache
def case(seed: int, room: float, pool: SolverPool) -> tuple[StepModel, StepProblem]:
    """A problem of a random step whose limit lies between the smallest peak and that of the cheapest decision."""
    drawn = ((model, optimum(kiwi_chain_problem(model, None))) for model in map(random_step, count(seed, 1000)))
    model, cheapest = next((model, cheapest) for model, cheapest in drawn if cheapest is not None)
    rule = latest_moments(model, dict.fromkeys(chain_moments(model)))
    most = replay_decision(model, cheapest.decision).peak
    least = minimum_peak(kiwi_chain_problem(model, None).problem, MEMORY, BEFORE, pool).peak
    assert least is not None
    return model, kiwi_chain_problem(model, least + int(room * (most - least)), [rule])


@cache
def case_optimum(seed: int, room: float, pool: SolverPool) -> Candidate:
    """The best decision of a case."""
    best = optimum(case(seed, room, pool)[1])
    assert best is not None
    return best


def with_restrictions(built: StepProblem, *restrictions: Callable[[], StepProblem]) -> StepProblem:
    return replace(built, restrictions=restrictions)


def endless(built: StepProblem) -> StepProblem:
    """A problem of many nodes, which takes longer than a test has; whatever is found there, it means the same."""
    decision = StepDecision((0,) * len(built.layouts), {})
    return replace(
        built,
        build=lambda: family_problem("cliques", "large"),
        decode=lambda choices: decision,
        encode=leave_out,
        overestimate=None,
    )


def leave_out(decision: StepDecision) -> tuple[int, ...]:
    raise ValueError(f"{decision} is not in this problem")


@pytest.mark.fast_cases("0-options1", "1-options2")
@pytest.mark.parametrize("options", [BESIDE, BEFORE, replace(BESIDE, iteration_limit=1)])
@pytest.mark.parametrize("seed", some_of(40))
def test_no_dearer_than_any_smaller_problem_and_no_cheaper_than_the_optimum(seed, options, pool):
    for room in (0.0, 0.5):
        model, built = case(seed, room, pool)
        best = case_optimum(seed, room, pool)
        found, start = solve_with_restrictions(
            built, None, SolveContext(execution(model), DEFAULT_SOLVER, options, pool)
        )
        assert found.objective is not None
        assert found.objective >= best.executed.cost
        assert found.objective == best.executed.cost or options.iteration_limit is not None
        assert start is None or start.executed == execution(model)(start.decision)
        if options is BEFORE and built.restrictions:  # all of them have ended then
            smaller = [each for build in built.restrictions if (each := optimum(build())) is not None]
            assert (start is None) == (not smaller)
            assert start is None or start.executed.cost == min(each.executed.cost for each in smaller)


@pytest.mark.parametrize("options", [BESIDE, BEFORE])
@pytest.mark.parametrize("seed", some_of(20))
def test_solves_of_deep_models_find_the_optimum(seed, options, pool):
    """With offload too (no operator here is worth a copy), which then begins from the same smaller problems."""
    for room in (0.0, 0.5):
        model, built = case(seed, room, pool)
        offload = kiwi_offload_problem(model, built.problem.resources[MEMORY].limit, Links(blocking=True), built.rules)
        assert len(offload.restrictions) == len(built.restrictions)
        best = case_optimum(seed, room, pool)
        for each in (built, offload):
            solved = solve_step(each, SolveContext(execution(model), DEFAULT_SOLVER, options, pool))
            assert isinstance(solved, SolvedStep)
            assert solved.result.objective == best.executed.cost
            assert execution(model)(solved.decision).cost == best.executed.cost


@pytest.mark.parametrize("options", [BESIDE, BEFORE])
def test_an_infeasible_problem_stays_one(options, pool):
    for seed in range(2):
        model, built = case(seed, 0.0, pool)
        limit = built.problem.resources[MEMORY].limit
        assert limit
        below = kiwi_chain_problem(model, limit - 1, built.rules)
        found, start = solve_with_restrictions(
            below, None, SolveContext(execution(model), DEFAULT_SOLVER, options, pool)
        )
        assert found.status is Status.INFEASIBLE
        assert start is None


def test_a_decision_is_returned_once_and_only_where_it_was_not_known(pool):
    model, built = case(0, 0.5, pool)
    best = case_optimum(0, 0.5, pool)
    with RestrictionsBeside(built, best, SolveContext(execution(model), DEFAULT_SOLVER, BEFORE, pool)) as beside:
        assert beside.best is best
        assert beside.newest() is None
    with RestrictionsBeside(built, None, SolveContext(execution(model), DEFAULT_SOLVER, BESIDE, pool)) as beside:
        while (told := beside.newest()) is None:
            time.sleep(0.01)
    first, later = execution(model)(built.decode(told)), beside.newest()
    limit = built.problem.resources[MEMORY].limit
    assert limit is not None
    assert first.peak <= limit
    assert later is None or execution(model)(built.decode(later)).cost < first.cost
    assert beside.newest() is None


def test_the_solver_of_the_larger_problem_receives_it(pool, monkeypatch):
    """It does nothing else here, and waits until it does."""
    heard = []

    def listen(problem, solver, options, progress, pool, should_stop=None, from_others=None):
        if from_others is None:
            return solve(problem, solver, options, progress, pool, should_stop)
        while (found := from_others()) is None:
            time.sleep(0.01)
        heard.append(found)
        return solve(problem, "greedy", replace(options, initial_choices=found), progress, pool)

    monkeypatch.setattr(step_beside, "solve", listen)
    model, built = case(1, 0.5, pool)
    found, start = solve_with_restrictions(built, None, SolveContext(execution(model), DEFAULT_SOLVER, BESIDE, pool))
    assert len(heard) == 1
    assert start is not None
    assert found.objective is not None
    assert built.decode(heard[0]).layouts
    assert found.objective <= execution(model)(built.decode(heard[0])).cost


@pytest.mark.parametrize(("workers", "has_them"), [(1, True), (2, False), (3, True)])
def test_a_solver_that_needs_both_processes_has_no_restrictions_beside_it(workers, has_them, pool, monkeypatch):
    used = []

    def begin(*arguments):
        used.append(arguments)
        return RestrictionsBeside(*arguments)

    monkeypatch.setattr(step_beside, "RestrictionsBeside", begin)
    model, built = case(0, 0.5, pool)
    context = SolveContext(execution(model), DEFAULT_SOLVER, replace(BESIDE, workers=workers), pool)
    found, _ = solve_with_restrictions(built, None, context)
    assert found.objective == case_optimum(0, 0.5, pool).executed.cost
    assert bool(used) == has_them


def test_it_ends_with_the_larger_problem(pool):
    """With an hour to go it would outlast this test's own limit."""
    model, built = case(2, 0.0, pool)
    begun = threading.Event()

    def build() -> StepProblem:
        begun.set()
        return endless(built)

    options = replace(BESIDE, time_limit=ENDLESS)
    larger = with_restrictions(built, build, build)
    with RestrictionsBeside(larger, None, SolveContext(execution(model), DEFAULT_SOLVER, options, pool)) as beside:
        assert not begun.wait(0.2), "not before the larger problem's solver asks"
        assert beside.newest() is None
        assert begun.wait(60.0)


@pytest.mark.slow
def test_a_smaller_problem_that_cannot_be_cheaper_is_left(pool):
    """Any bound is above what is known here; with an hour for each they would outlast this test's own limit."""
    model, built = case(2, 0.0, pool)
    larger = with_restrictions(built, lambda: endless(built), lambda: endless(built))
    known = Candidate(StepDecision((0,) * len(built.layouts), {}), Executed(-1, 0))
    options = replace(BEFORE, time_limit=ENDLESS)
    with RestrictionsBeside(larger, known, SolveContext(execution(model), DEFAULT_SOLVER, options, pool)) as beside:
        assert beside.best is known
        assert beside.newest() is None


@pytest.mark.parametrize("at_work", [True, False])
def test_ctrl_c_ends_what_comes_before(at_work, pool, monkeypatch):
    """Nothing else begins then; with an hour for each problem they would outlast this test's own limit."""
    model, built = case(2, 0.0, pool)
    tried = []

    def interrupted(problem, solver, options, *_):
        tried.append(problem)
        return replace(solve(problem, "greedy", replace(options, time_limit=1.0), None, pool), message="interrupted")

    monkeypatch.setattr(step_beside, "solve", interrupted)
    larger = with_restrictions(built, lambda: endless(built), lambda: endless(built))
    options = replace(BESIDE if at_work else BEFORE, time_limit=ENDLESS)
    with RestrictionsBeside(larger, None, SolveContext(execution(model), DEFAULT_SOLVER, options, pool)) as beside:
        while not tried:
            beside.newest()
            time.sleep(0.01)
    assert len(tried) == 1


@pytest.mark.parametrize("counts_too_much", [True, False])
def test_a_start_that_a_problem_does_not_allow_is_no_contradiction(counts_too_much, pool, monkeypatch):
    """A problem on the safe side may allow nothing, while a decision fits when it is executed."""
    model, built = case(1, 0.5, pool)
    best = case_optimum(1, 0.5, pool)
    nothing = replace(solve(built.problem, "greedy", BEFORE, None, pool), status=Status.INFEASIBLE, choices=None)
    monkeypatch.setattr(driver, "solve_with_restrictions", lambda built, start, context: (nothing, start))
    context = SolveContext(execution(model), DEFAULT_SOLVER, BEFORE, pool)
    if counts_too_much:
        resources = (replace(built.problem.resources[MEMORY], limit=-1), *built.problem.resources[MEMORY + 1 :])
        limited = replace(built.problem, resources=resources)
        built = replace(built, build=lambda: limited)
        found, start = solve_or_smallest_peak(built, best, context)
        assert isinstance(found, SolveResult)
        assert found.choices is not None
        assert built.decode(found.choices) == best.decision
        assert start is best
    else:
        with pytest.raises(SolverContradiction, match="nothing fits"):
            solve_or_smallest_peak(built, best, context)


def test_an_error_in_the_background_is_raised(pool):
    tried = threading.Event()

    def fails() -> StepProblem:
        tried.set()
        raise ArithmeticError("no such problem")

    model, built = case(3, 0.5, pool)
    larger = with_restrictions(built, fails)

    def ask() -> None:
        with RestrictionsBeside(larger, None, SolveContext(execution(model), DEFAULT_SOLVER, BESIDE, pool)) as beside:
            assert beside.newest() is None
            assert tried.wait(60.0)

    with pytest.raises(ArithmeticError, match="no such problem"):
        ask()
    with RestrictionsBeside(larger, None, SolveContext(execution(model), DEFAULT_SOLVER, BESIDE, pool)):
        pass  # solved before anybody asked: nothing began


@pytest.mark.parametrize(
    ("patient", "known", "pointless"), [(False, None, True), (True, None, False), (False, 10, False)]
)
def test_patience_ends_when_nothing_better_came_for_long(patient, known, pointless, monkeypatch):
    """Only for who has none, and not before anything better than what was known has come."""
    clock = [0.0]
    monkeypatch.setattr(step_beside.time, "monotonic", lambda: clock[0])
    watch = Patience(lambda: None, patient, 1000.0, known, begun=0.0)
    clock[0] = 1.0
    watch.report(Progress(1.0, 10, None, "somebody"))
    assert not watch.is_over()
    clock[0] = 1.0 + step_beside._PATIENCE_SECONDS + step_beside._PATIENCE + 0.01
    assert watch.is_over() == pointless
    watch.report(Progress(1.0, 9, None, "somebody"))
    assert not watch.is_over()


@pytest.mark.parametrize("patient", [False, True])
def test_patience_ends_where_a_restriction_improves_nothing(patient, monkeypatch):
    """After a part of its time, and only where anything is known."""
    clock = [0.0]
    monkeypatch.setattr(step_beside.time, "monotonic", lambda: clock[0])
    known = Patience(lambda: 10, patient, 8.0, 10, begun=0.0)
    unknown = Patience(lambda: None, patient, 8.0, begun=0.0)
    clock[0] = 1.0
    assert not known.is_over()
    clock[0] = 8.0 * step_beside._UNIMPROVED_SHARE + 0.01
    assert known.is_over()
    assert not unknown.is_over()
    known.report(Progress(clock[0], 9, None, "somebody"))
    assert not known.is_over()
