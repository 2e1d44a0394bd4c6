"""What a solve begins from is a decision within the limit that neither other reruns nor other layouts alone improve."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import count

import pytest
from support.steps.random_steps import decisions, random_step
from support.tiers import first

from formulations.problem.checker import check
from formulations.problem.solution import KnownBound, Proof, SolveOptions, Status
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers import solve
from formulations.solvers.peaks.minimum_peak import MinimumPeak, without_limit
from formulations.step.holds import shortest_holds
from formulations.step.kiwi_chain import chain_moments
from formulations.step.modes import once_or_twice
from formulations.step.offload.model import Links
from formulations.step.replay import replay_decision
from formulations.step.sharding import MEMORY
from formulations.step.solving import driver, registry, stages
from formulations.step.solving.context import Candidate, Executed, FreeDecision, SolveContext
from formulations.step.solving.driver import begin, solve_step
from formulations.step.solving.registry import (
    kiwi_chain_problem,
    kiwi_offload_problem,
    kiwi_reduced_problem,
    sharding_problem,
)
from formulations.step.solving.solved import SolvedStep
from formulations.step.solving.step_problem import StepProblem
from formulations.step.training_step import StepDecision, StepModel

AMPLE = SolveOptions(time_limit=600.0, workers=1)
NO_TIME = replace(AMPLE, time_limit=1e-6)
EXACT = "brute_force"


def execution(model: StepModel):
    def execute(decision: StepDecision) -> Executed:
        replay = replay_decision(model, decision)
        return Executed(replay.cost, replay.peak)

    return execute


def refuse() -> StepProblem:
    raise AssertionError("no smaller problem is worth its time here")


def contained(built: StepProblem, found: list[StepDecision]) -> list[StepDecision]:
    """Decisions that a problem contains, whatever they hold."""
    unlimited = without_limit(built.problem, MEMORY)

    def holds(decision: StepDecision) -> bool:
        try:
            choices = built.encode(decision)
        except ValueError:
            return False
        return check(unlimited, shortest_holds(unlimited, choices)).ok

    return [decision for decision in found if holds(decision)]


@cache
def executed_decisions(seed: int, **options: int) -> tuple[StepModel, list[tuple[StepDecision, Executed]]]:
    """A random step, and every decision of its chain problem, executed."""
    model = random_step(seed, **options)
    modes = once_or_twice(model, chain_moments(model))
    space = contained(kiwi_chain_problem(model, None), list(decisions(model, modes)))
    return model, [(decision, execution(model)(decision)) for decision in space]


def step_with_decisions(seed: int, **options: int) -> tuple[StepModel, list[tuple[StepDecision, Executed]]]:
    """The first of several random steps in which some layouts go together, and its decisions."""
    drawn = (executed_decisions(seed + 1000 * attempt, **options) for attempt in count())
    return next((model, space) for model, space in drawn if space)


def least(found: list[tuple[StepDecision, Executed]], limit: int) -> int | None:
    return min((executed.cost for _, executed in found if executed.peak <= limit), default=None)


def limits_of(found: list[tuple[StepDecision, Executed]]) -> list[int]:
    """Limits below, at and above the smallest peak, and one at which the cheapest decision just fits."""
    floor = min(executed.peak for _, executed in found)
    cheapest = min(executed.cost for _, executed in found)
    free = min(executed.peak for _, executed in found if executed.cost == cheapest)
    return sorted({floor - 1, floor, (floor + free) // 2, free - 1, free})


@pytest.mark.parametrize("seed", first(8, range(24)))
def test_no_other_reruns_and_no_other_layouts_alone_are_cheaper(seed, pool):
    model, space = step_with_decisions(seed)
    narrow = [within(space, build(model, None)) for build in (sharding_problem, kiwi_reduced_problem)]
    for limit in limits_of(space):
        built = kiwi_chain_problem(model, limit)
        start = begin(built, SolveContext(execution(model), EXACT, AMPLE, pool))
        optimum = least(space, limit)
        if start is None:
            assert all(executed.peak > limit for _, executed in within(space, kiwi_reduced_problem(model, limit)))
            continue
        assert start.executed == execution(model)(start.decision)
        assert start.executed.peak <= limit
        assert optimum is not None
        assert optimum <= start.executed.cost
        assert start.executed.cost <= (least(alike(space, start, "layouts"), limit) or 0)
        assert start.executed.cost <= (least(alike(space, start, "recomputed"), limit) or 0)
        for inside in narrow:
            narrowest = least(inside, limit)
            assert narrowest is None or start.executed.cost <= narrowest


def within(space: list[tuple[StepDecision, Executed]], built: StepProblem) -> list[tuple[StepDecision, Executed]]:
    """The decisions that a problem contains, as they were executed."""
    inside = {id(decision) for decision in contained(built, [decision for decision, _ in space])}
    return [(decision, executed) for decision, executed in space if id(decision) in inside]


def alike(
    space: list[tuple[StepDecision, Executed]], start: Candidate, what: str
) -> list[tuple[StepDecision, Executed]]:
    """The decisions with a start's layouts, or with its reruns."""
    return [pair for pair in space if getattr(pair[0], what) == getattr(start.decision, what)]


def test_a_decision_that_fits_without_a_limit_ends_the_search(pool):
    model, space = executed_decisions(3)
    limit = max(executed.peak for _, executed in space)
    built = replace(kiwi_chain_problem(model, limit), restrictions=(refuse,))
    start = begin(built, SolveContext(execution(model), EXACT, AMPLE, pool))
    assert start is not None
    assert start.executed.cost == least(space, limit)
    assert check(built.problem, built.encoded(start.decision)).objective == start.executed.cost


@pytest.mark.parametrize("seed", range(6))
def test_the_decision_without_a_limit_is_found_once(seed, pool):
    model, space = step_with_decisions(seed)
    free = FreeDecision()
    for limit in reversed(limits_of(space)):
        built = kiwi_chain_problem(model, limit)
        alone = begin(built, SolveContext(execution(model), EXACT, AMPLE, pool))
        known = begin(built, SolveContext(execution(model), EXACT, AMPLE, pool, free=free))
        assert (None if known is None else known.executed) == (None if alone is None else alone.executed)
        assert free.decision is not None
        assert not free.decision.recomputed
        assert execution(model)(free.decision).cost == min(executed.cost for _, executed in space)
        free = replace(free)
        assert (
            begin(replace(built, unlimited=refuse), SolveContext(execution(model), EXACT, AMPLE, pool, free=free))
            is None
        ) == (known is None)


@pytest.mark.parametrize("seed", range(6))
def test_known_decisions_within_the_limit_are_begun_from(seed):
    model, space = step_with_decisions(seed)
    known = [decision for decision, _ in space]
    for limit in limits_of(space):
        start = begin(
            kiwi_chain_problem(model, limit), SolveContext(execution(model), "no solver", NO_TIME, None, known=known)
        )
        assert (None if start is None else start.executed.cost) == least(space, limit)


@pytest.mark.parametrize("build", [sharding_problem, kiwi_reduced_problem, kiwi_chain_problem])
@pytest.mark.parametrize("seed", range(6))
def test_without_time_something_is_found_that_fits_a_large_limit(seed, build, pool):
    model, space = step_with_decisions(seed)
    limit = max(executed.peak for _, executed in space)
    for solver in ("portfolio", "highs"):
        found = solve_step(build(model, limit), SolveContext(execution(model), solver, NO_TIME, pool))
        assert isinstance(found, SolvedStep)
        assert execution(model)(found.decision).peak <= limit


@pytest.mark.parametrize("seed", range(6))
def test_a_known_decision_does_not_end_the_search(seed, pool):
    """The decision without a limit may be optimal, while it is the known one that fits."""
    model, space = step_with_decisions(seed)
    reduced = within(space, kiwi_reduced_problem(model, None))
    for limit in limits_of(space)[1:]:
        fitting = [pair for pair in space if pair[1].peak <= limit]
        dearest, _ = max(fitting, key=lambda pair: pair[1].cost)
        start = begin(
            kiwi_chain_problem(model, limit), SolveContext(execution(model), EXACT, AMPLE, pool, known=[dearest])
        )
        assert start is not None
        optimum = least(reduced, limit)
        assert optimum is None or start.executed.cost <= optimum


def test_a_known_decision_that_the_problem_leaves_out_is_refused():
    model, space = step_with_decisions(0)
    recomputed = next(decision for decision, _ in space if decision.recomputed)
    with pytest.raises(ValueError, match="cannot run again before"):
        begin(sharding_problem(model, None), SolveContext(execution(model), EXACT, AMPLE, None, known=[recomputed]))


@pytest.mark.parametrize("seed", range(12))
def test_with_one_layout_rules_are_tried_and_nothing_is_solved(seed, pool):
    model, space = step_with_decisions(seed, layouts=1)
    rules = [{i: mode[0] for i, mode in decision.recomputed.items()} for decision, _ in space if once(decision)]
    for limit in limits_of(space):
        built = kiwi_chain_problem(model, limit, rules)
        assert built.restrictions == ()
        start = begin(built, SolveContext(execution(model), "no solver", AMPLE))
        by_rule = [(decision, executed) for decision, executed in space if once(decision)]
        assert (None if start is None else start.executed.cost) == least(by_rule, limit)


@pytest.mark.parametrize("deep", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_rules_are_tried_where_other_problems_are_not(seed, deep, pool, monkeypatch):
    """They would be large themselves, or what finds columns in deep models needs their time."""
    if deep:
        monkeypatch.setattr(SolveContext, "solves_by_patterns", lambda self, problem: True)
    else:
        monkeypatch.setattr(registry, "LARGEST_REACHED", 0)
    model, space = step_with_decisions(seed)
    sharding = sharding_problem(model, None)
    free = sharding.decode(solve(sharding.problem, EXACT, AMPLE, None, pool).choices or ())
    by_rule = [(decision, executed) for decision, executed in space if decision.layouts == free.layouts]
    by_rule = [(decision, executed) for decision, executed in by_rule if once(decision)]
    rules = [{i: mode[0] for i, mode in decision.recomputed.items()} for decision, _ in by_rule]
    for limit in limits_of(space):
        built = kiwi_chain_problem(model, limit, rules)
        built = replace(built, restrictions=(refuse,) * len(built.restrictions))
        start, least_by_rule = begin(built, SolveContext(execution(model), EXACT, AMPLE, pool)), least(by_rule, limit)
        assert least_by_rule is None or (start is not None and start.executed.cost <= least_by_rule)


def once(decision: StepDecision) -> bool:
    """Whether nothing runs again twice."""
    return all(len(mode) == 1 for mode in decision.recomputed.values())


@pytest.mark.parametrize("seed", range(4))
def test_the_first_decision_within_the_limit_is_told_once(seed, pool):
    model, space = step_with_decisions(seed)
    for limit in limits_of(space):
        for built in (kiwi_chain_problem(model, limit), kiwi_offload_problem(model, limit, Links())):
            told: list[int] = []
            start = begin(built, SolveContext(execution(model), EXACT, AMPLE, pool), told.append)
            assert len(told) == (start is not None)
            assert start is None or told[0] >= start.executed.cost


@pytest.mark.parametrize("seed", range(6))
def test_what_extends_a_problem_begins_from_its_optimum(seed, pool):
    model, space = step_with_decisions(seed)
    for limit in limits_of(space):
        start = begin(kiwi_offload_problem(model, limit, Links()), SolveContext(execution(model), EXACT, AMPLE, pool))
        assert (None if start is None else start.executed.cost) == least(space, limit)


@pytest.mark.slow
def test_a_solve_keeps_what_it_began_from_where_the_solver_finds_less(pool):
    """Greedy alone finds dearer decisions for some of these steps, or none."""
    for seed in range(12):
        model, space = executed_decisions(seed)
        for limit in limits_of(space)[1:]:
            built = kiwi_chain_problem(model, limit)
            start = begin(built, SolveContext(execution(model), "greedy", AMPLE, pool))
            found = solve_step(built, SolveContext(execution(model), "greedy", AMPLE, pool))
            if start is not None:
                assert isinstance(found, SolvedStep)
                assert found.result.objective is not None
                assert found.result.objective <= start.executed.cost
                assert found.result.objective == execution(model)(found.decision).cost >= (least(space, limit) or 0)


@pytest.mark.parametrize("seed", range(4))
def test_no_plan_costs_less_than_the_best_without_a_limit(seed, pool):
    """Greedy alone proves nothing."""
    model, space = step_with_decisions(seed)
    cheapest = min(executed.cost for _, executed in space)
    free = FreeDecision()
    for limit in reversed(limits_of(space)[1:]):
        built = kiwi_chain_problem(model, limit)
        begin(built, SolveContext(execution(model), EXACT, AMPLE, pool, free=free))
        assert free.cost == cheapest
        found = solve_step(built, SolveContext(execution(model), "greedy", AMPLE, pool, free=free))
        assert isinstance(found, SolvedStep)
        assert found.result.bound == cheapest
        assert (found.result.status is Status.OPTIMAL) == (found.result.objective == cheapest)


def test_smaller_problems_are_tried_again_where_nothing_is_found(pool, monkeypatch):
    """``tree_dp`` knows no limits: it finds nothing within this one but what it begins from."""
    model, space = executed_decisions(3)
    limit = limits_of(space)[1]
    built = kiwi_chain_problem(model, limit)
    tried = []

    def late(built, context, *_):
        tried.append(context.options.time_limit)
        return None if len(tried) == 1 else begin(built, replace(context, solver=EXACT))

    def unknown(problem, resource, options, pool):
        return MinimumPeak("memory", None, 0, False, False, None, None, "", (), 0.0, "none", "")

    monkeypatch.setattr(driver, "begin", late)
    monkeypatch.setattr(driver, "minimum_peak", unknown)
    found = solve_step(built, SolveContext(execution(model), "tree_dp", AMPLE, pool))
    assert len(tried) == 2
    assert tried[1] == AMPLE.time_limit > tried[0]
    assert isinstance(found, SolvedStep)
    assert execution(model)(found.decision).peak <= limit


def never_built() -> StrategyProblem:
    raise AssertionError("the limit cannot bind, so the problem without one is enough")


@pytest.mark.parametrize("limit", [None, 10**12])
@pytest.mark.parametrize("seed", range(4))
def test_a_limit_that_cannot_bind_is_planned_without_it(seed, limit, pool):
    model, space = step_with_decisions(seed)
    built = replace(kiwi_chain_problem(model, limit), build=never_built)
    assert stages.is_slack(built)
    found = solve_step(built, SolveContext(execution(model), EXACT, AMPLE, pool))
    assert isinstance(found, SolvedStep)
    assert found.result.status is Status.OPTIMAL
    assert found.result.objective == found.result.bound == min(executed.cost for _, executed in space)
    assert found.result.objective == execution(model)(found.decision).cost
    assert found.bounding_problem().resources[MEMORY].limit is None


@pytest.mark.parametrize("seed", range(4))
def test_a_limit_that_cannot_bind_is_above_every_peak(seed):
    model, space = step_with_decisions(seed)
    largest = max(executed.peak for decision, executed in space if not decision.recomputed)
    built = kiwi_chain_problem(model, largest - 1)
    assert not stages.is_slack(built)


def without_reruns(space: list[tuple[StepDecision, Executed]]) -> list[Candidate]:
    """The decisions without reruns, the cheapest first."""
    return sorted((Candidate(*own) for own in space if not own[0].recomputed), key=lambda own: own.executed.cost)


@pytest.mark.parametrize("seed", range(4))
def test_where_the_cheapest_known_without_a_limit_fits_only_that_problem_is_solved(seed, pool):
    """It is not the best one: that fits as well and is found, though the problem under the limit is not built."""
    model, space = step_with_decisions(seed)
    candidates = without_reruns(space)
    limit = max(own.executed.peak for own in candidates)
    known = candidates[min(3, len(candidates) - 1)]
    built = replace(kiwi_chain_problem(model, limit), build=never_built)
    free = FreeDecision(best=known)
    found = solve_step(built, SolveContext(execution(model), EXACT, AMPLE, pool, free=free))
    assert isinstance(found, SolvedStep)
    assert found.result.status is Status.OPTIMAL
    assert found.result.objective == candidates[0].executed.cost == execution(model)(found.decision).cost
    assert free.decision is not None


def test_a_known_decision_with_reruns_may_be_cheaper_than_all_that_is_known_without(pool):
    """The problem without a limit does not contain the reruns; its search begins from the layouts alone."""
    tried = 0
    for seed in range(12):
        model, space = step_with_decisions(seed)
        candidates, limit = without_reruns(space), max(executed.peak for _, executed in space)
        reruns = [Candidate(*own) for own in space if own[0].recomputed]
        with_reruns = min(reruns, key=lambda own: own.executed.cost, default=candidates[-1])
        if with_reruns.executed.cost >= candidates[-1].executed.cost:
            continue
        tried += 1
        free = FreeDecision(best=candidates[-1])
        context = SolveContext(execution(model), EXACT, AMPLE, pool, known=(with_reruns.decision,), free=free)
        found = solve_step(kiwi_chain_problem(model, limit), context)
        assert isinstance(found, SolvedStep)
        assert found.result.objective == candidates[0].executed.cost, seed
    assert tried >= 4


def test_a_better_decision_without_a_limit_that_does_not_fit_brings_the_limit_back(pool):
    tried = 0
    for seed in range(12):
        model, space = step_with_decisions(seed)
        best, *others = without_reruns(space)
        limit = best.executed.peak - 1
        fitting = [own for own in others if own.executed.peak <= limit and own.executed.cost > best.executed.cost]
        if not fitting:
            continue
        tried += 1
        context = SolveContext(execution(model), EXACT, AMPLE, pool, free=FreeDecision(best=fitting[0]))
        found = solve_step(kiwi_chain_problem(model, limit), context)
        assert isinstance(found, SolvedStep)
        assert found.result.objective == least(space, limit), seed
        assert context.free.cost == min(executed.cost for _, executed in space)
    assert tried >= 4


def test_what_is_known_without_a_limit_only_gets_better():
    decision = StepDecision((0,), {})
    free = FreeDecision()
    assert not free.is_as_cheap(Candidate(decision, Executed(1, 1)))
    free.learn(Candidate(decision, Executed(10, 5)), KnownBound(7, Proof.EXACT, "blocks"))
    free.learn(Candidate(decision, Executed(12, 1)), KnownBound(6, Proof.EXACT, "highs"))
    free.learn(Candidate(decision, Executed(10, 1)), None)
    assert free.best == Candidate(decision, Executed(10, 5))
    assert free.bound == KnownBound(7, Proof.EXACT, "blocks")
    assert free.decision is free.cost is None
    assert free.is_as_cheap(Candidate(decision, Executed(10, 9)))
    assert not free.is_as_cheap(Candidate(decision, Executed(11, 9)))
    assert not free.is_as_cheap(None)
    free.learn(Candidate(decision, Executed(7, 9)), None)
    assert free.decision is decision
    assert free.cost == 7


def test_a_plan_within_the_gap_of_the_best_without_a_limit_ends_the_search():
    free = FreeDecision(bound=KnownBound(1_000_000, Proof.EXACT, "lagrangian"))
    assert free.is_near(1_000_000)
    assert free.is_near(1_000_100)
    assert not free.is_near(1_000_101)
    assert not FreeDecision().is_near(1)


def test_the_gap_that_is_asked_for_is_one_of_cost_and_not_of_the_smallest_peak(pool, monkeypatch):
    """Else a search for the smallest peak might end above a limit that something fits into."""
    model, space = executed_decisions(3)
    asked = []

    def unknown(problem, resource, options, pool):
        asked.append(options.relative_gap)
        return MinimumPeak("memory", None, 0, False, False, None, None, "", (), 0.0, "none", "")

    monkeypatch.setattr(driver, "minimum_peak", unknown)
    monkeypatch.setattr(driver, "begin", lambda *_: None)
    context = SolveContext(execution(model), "tree_dp", replace(AMPLE, relative_gap=0.5), pool)
    assert isinstance(solve_step(kiwi_chain_problem(model, limits_of(space)[1]), context), MinimumPeak)
    assert asked
    assert set(asked) == {0.0}
