"""The second bound is of another method than the first, and never above the optimum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import count

import pytest
from support.steps.random_steps import random_step

from formulations.problem.solution import Proof, SolveOptions, SolveResult, Status
from formulations.solvers import SolverPool
from formulations.solvers.protocol.registry import method_of
from formulations.step.offload.model import Links
from formulations.step.replay import replay_decision
from formulations.step.solving import second_bound
from formulations.step.solving.context import Executed, SolveContext
from formulations.step.solving.driver import solve_step
from formulations.step.solving.registry import kiwi_chain_problem, kiwi_offload_problem
from formulations.step.solving.second_bound import SecondBound, ranked
from formulations.step.solving.solved import SolvedStep
from formulations.step.solving.step_problem import StepProblem
from formulations.step.training_step import StepDecision, StepModel

OPTIONS = SolveOptions(time_limit=60.0, workers=1)
Formulation = Callable[[StepModel, int | None], StepProblem]


def execution(model: StepModel) -> Callable[[StepDecision], Executed]:
    def execute(decision: StepDecision) -> Executed:
        replayed = replay_decision(model, decision)
        return Executed(replayed.cost, replayed.peak)

    return execute


def solved_step(seed: int, formulation: Formulation, pool: SolverPool) -> SolvedStep:
    """A solved step, where possible within one byte less than its best plan needs."""
    for attempt in count():
        model = random_step(seed + 1000 * attempt)
        context = SolveContext(execution(model), "brute_force", OPTIONS, pool)
        free = solve_step(formulation(model, None), context)
        if isinstance(free, SolvedStep):
            limit = context.execute(free.decision).peak - 1
            tight = solve_step(formulation(model, limit), context)
            return tight if isinstance(tight, SolvedStep) else free
    raise AssertionError("some layouts of some step go together")


@pytest.mark.parametrize("proved_by", ["lagrangian", "highs", "tree_dp", ""])
@pytest.mark.parametrize("seed", range(6))
def test_it_is_of_another_method_and_at_most_the_optimum(seed, proved_by, pool, monkeypatch):
    monkeypatch.setattr(second_bound, "NEAR_ENOUGH", 0.0)
    solved = solved_step(seed, kiwi_chain_problem, pool)
    assert solved.result.status is Status.OPTIMAL
    solved = replace(solved, result=replace(solved.result, proved_by=proved_by))
    with SecondBound(solved, 1.0 if proved_by == "tree_dp" else 60.0, 0, pool) as second:
        found = second.result()
    assert found.bound is not None
    assert 0 < found.bound <= solved.result.objective
    assert method_of(found.solver) != method_of(proved_by)


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("seed", range(3))
def test_where_the_problem_leaves_plans_out_it_bounds_those_too(seed, pool):
    def with_offload(model, limit):
        return kiwi_offload_problem(model, limit, Links())

    solved = solved_step(seed, with_offload, pool)
    with SecondBound(solved, 1.0, 0, pool) as second:
        found = second.result()
    assert found.bound is None or found.bound <= solved.result.objective


def test_it_stops_where_it_is_near_enough(pool, monkeypatch):
    monkeypatch.setattr(second_bound, "NEAR_ENOUGH", 0.9)
    monkeypatch.setattr(second_bound, "LONGEST_SECONDS", 3600.0)
    solved = solved_step(0, kiwi_chain_problem, pool)
    with SecondBound(solved, 3600.0, 0, pool) as second:
        found = second.result()
    assert found.bound is not None
    assert found.bound <= solved.result.objective


@pytest.mark.parametrize(
    ("first", "second", "bound", "other", "status"),
    [
        (90, 80, 90, 80, Status.FEASIBLE),
        (90, None, 90, None, Status.FEASIBLE),
        (None, 80, 80, None, Status.FEASIBLE),
        (80, 90, 90, 80, Status.FEASIBLE),
        (80, 100, 100, 80, Status.OPTIMAL),
        (80, 101, 80, 101, Status.FEASIBLE),
    ],
)
def test_the_higher_bound_is_the_plans(first, second, bound, other, status):
    """Unless it is above the cost: then it stays the second one, which refuses the plan."""
    usage = (0.0, 0.0, 0, ())
    gap = None if first is None else (100 - first) / 100
    found = SolveResult(Status.FEASIBLE, (0,), 100, first, gap, "portfolio", *usage, proof=Proof.EXACT)
    alone = SolveResult(Status.BOUND_ONLY, None, None, second, None, "bucket_bound", *usage, proof=Proof.EXACT)
    better, rest = ranked(found, alone)
    assert (better.bound, rest.bound, better.status) == (bound, other, status)
    assert better.gap == (None if bound is None else (100 - bound) / 100)
