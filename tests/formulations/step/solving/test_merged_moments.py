"""Relaxations with merged moments on random steps: bounds and decisions against every decision of the problem."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from support.steps.random_steps import decisions, random_step
from support.tiers import first

from formulations.problem.checker import check
from formulations.problem.solution import SolveOptions
from formulations.solvers import SolverPool, solve, solve_in_process
from formulations.solvers.peaks.minimum_peak import without_limit
from formulations.step.moment_classes import MomentClasses
from formulations.step.replay import replay_decision
from formulations.step.sharding import MEMORY
from formulations.step.solving import merged_moments, registry
from formulations.step.solving.context import Executed, SolveContext, executed
from formulations.step.solving.driver import solve_step
from formulations.step.solving.merged_moments import search_merged
from formulations.step.solving.registry import kiwi_chain_problem
from formulations.step.solving.search import Search
from formulations.step.solving.solved import SolvedStep
from formulations.step.solving.step_problem import StepProblem
from formulations.step.training_step import StepDecision, StepModel

AMPLE = SolveOptions(time_limit=600.0, workers=1)
EXACT = "brute_force"


@pytest.fixture(autouse=True)
def small_problems_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "LARGEST_TWICE", -1)
    monkeypatch.setattr(registry, "LARGEST_EXACT", -1)
    # The classes are as wide as they may be at first, so that they have to be divided.
    monkeypatch.setattr(merged_moments, "priced_times", lambda problem, deadline: ())


def all_executed(model: StepModel, built: StepProblem) -> list[tuple[StepDecision, Executed]]:
    """Every decision of a problem that nothing forbids, executed."""
    unlimited = without_limit(built.problem, MEMORY)
    return [
        (decision, executed(model, decision))
        for decision in decisions(model, built.modes)
        if check(unlimited, built.complete(unlimited, built.encode(decision))).ok
    ]


def limits_of(found: list[tuple[StepDecision, Executed]]) -> list[int]:
    """Limits at the smallest peak, at which the cheapest decision just fits, and between."""
    floor = min(entry.peak for _, entry in found)
    cheapest = min(entry.cost for _, entry in found)
    free = min(entry.peak for _, entry in found if entry.cost == cheapest)
    return sorted({floor, (2 * floor + free) // 3, (floor + 2 * free) // 3, free})


def search_of(built: StepProblem, model: StepModel, pool: SolverPool) -> Search:
    def find(smaller, start, options, patient):
        return solve(smaller.problem, EXACT, options, pool=pool), None

    execute: Callable[[StepDecision], Executed] = lambda decision: executed(model, decision)  # noqa: E731
    return Search(built, SolveContext(execute, EXACT, AMPLE, pool), find)


@pytest.mark.parametrize("seed", first(4, range(60), 12))
def test_bounds_hold_and_decisions_fit(seed: int, pool: SolverPool) -> None:
    model = random_step(seed)
    built = kiwi_chain_problem(model, 10**9)
    if built.merged is None or not built.modes:
        return
    found = all_executed(model, built)
    for limit in limits_of(found) if found else ():
        limited = kiwi_chain_problem(model, limit)
        optimum = min(entry.cost for _, entry in found if entry.peak <= limit)
        search = search_of(limited, model, pool)
        search_merged(search)
        assert search.bound is not None
        assert search.bound.value <= optimum
        if search.best is not None:
            assert search.best.executed.cost >= optimum
            assert replay_decision(model, search.best.decision).peak <= limit
            assert limited.contains(search.best.decision)


@pytest.mark.slow
def test_most_relaxations_end_at_the_optimum(pool: SolverPool) -> None:
    """Classes are divided until the optimum of the relaxation is one of the problem."""
    ended, divided = 0, 0
    for seed in range(40):
        model = random_step(seed)
        built = kiwi_chain_problem(model, 10**9)
        found = all_executed(model, built) if built.merged is not None and built.modes else []
        if not found:
            continue
        limit = limits_of(found)[0]
        limited = kiwi_chain_problem(model, limit)
        assert limited.merged is not None
        search = search_of(limited, model, pool)
        rounds: list[int] = []
        count = rounds.append

        def build(classes, merged=limited.merged, count=count):
            count(len(classes.firsts))
            return merged.build(classes)

        search.built = replace(limited, merged=replace(limited.merged, build=build))
        search_merged(search)
        assert rounds == sorted(set(rounds))
        divided += len(rounds) > 1
        optimum = min(entry.cost for _, entry in found if entry.peak <= limit)
        assert search.bound is not None
        ended += search.bound.value == optimum
        if ended >= 5 and divided:
            return
    raise AssertionError(f"{ended} relaxations ended at the optimum, {divided} were divided")


@pytest.mark.parametrize("seed", first(3, range(30), 6))
def test_a_whole_solve_takes_the_bound_of_its_relaxations(seed: int, pool: SolverPool) -> None:
    model = random_step(seed)
    built = kiwi_chain_problem(model, 10**9)
    found = all_executed(model, built) if built.merged is not None and built.modes else []
    for limit in limits_of(found)[:2] if found else ():
        context = SolveContext(lambda decision: executed(model, decision), EXACT, AMPLE, pool)
        solved = solve_step(kiwi_chain_problem(model, limit), context)
        optimum = min(entry.cost for _, entry in found if entry.peak <= limit)
        assert isinstance(solved, SolvedStep)
        assert solved.result.bound is not None
        assert solved.result.objective is not None
        assert solved.result.bound <= optimum <= solved.result.objective


@pytest.mark.parametrize("seed", first(4, range(60), 12))
def test_classes_become_finer_until_the_best_decision_of_a_relaxation_fits(seed: int) -> None:
    """Also where a rerun is needed in its class before any of its moments there, so that it is moved to another one."""
    model = random_step(seed)
    built = kiwi_chain_problem(model, 10**9)
    found = all_executed(model, built) if built.merged is not None and built.modes else []
    for limit in limits_of(found) if found else ():
        limited = kiwi_chain_problem(model, limit)
        merged = limited.merged
        assert merged is not None
        classes = MomentClasses.widest(model, merged.modes)
        while True:
            relaxation = merged.relaxation(classes)
            choices = solve_in_process(relaxation.problem, EXACT, AMPLE).choices
            assert choices is not None
            relaxed = relaxation.decode(choices)
            decision = merged.moved(classes, relaxed)
            if limited.contains(decision) and check(limited.problem, limited.encoded(decision)).ok:
                break
            finer = merged.divided(classes, limited, relaxed)
            assert set(finer.firsts) > set(classes.firsts)
            classes = finer
