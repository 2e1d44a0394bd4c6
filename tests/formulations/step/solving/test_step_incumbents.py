"""Earlier incumbents: executed where the last one turns out dear or large, and only while there is time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.steps.random_steps import random_step

from formulations.problem.checker import check
from formulations.problem.solution import Progress, Proof, SolveOptions, SolveResult, Status
from formulations.solvers import SolverPool, solve
from formulations.step.solving import driver
from formulations.step.solving.context import Candidate, Executed, SolveContext
from formulations.step.solving.driver import solve_step
from formulations.step.solving.registry import kiwi_chain_problem
from formulations.step.solving.search import Incumbents, Search
from formulations.step.solving.solved import SolvedStep
from formulations.step.solving.step_problem import StepProblem
from formulations.step.training_step import StepDecision

LIMIT = 100
OPTIONS = SolveOptions(time_limit=20.0, workers=1)


def problem() -> StepProblem:
    """A problem in which the first choice names the decision."""
    built = kiwi_chain_problem(random_step(0), LIMIT)
    return replace(built, decode=lambda choices: StepDecision((choices[0],), {}))


def reported(costs: Sequence[int], executions: dict[int, Executed]) -> tuple[Search, Incumbents, list[int]]:
    """Incumbents 0, 1, ... of these costs, and a list to which those that are executed are added."""
    executed: list[int] = []

    def execute(decision: StepDecision) -> Executed:
        (name,) = decision.layouts
        executed.append(name)
        return executions.get(name, Executed(costs[name], 0))

    def find(*_: object) -> tuple[SolveResult, Candidate | None]:
        raise AssertionError("nothing is solved here")

    search = Search(problem(), SolveContext(execute), find)
    incumbents = Incumbents(search)
    for k, cost in enumerate(costs):
        incumbents.report(Progress(0.0, cost, None, "somebody", (k,)))
        incumbents.report(Progress(0.0, cost, cost // 2, "a bound"))
    return search, incumbents, executed


def start(cost: int) -> Candidate:
    return Candidate(StepDecision((99,), {}), Executed(cost, 0))


@pytest.mark.parametrize(
    ("known", "deadline", "executions", "expected", "executed"),
    [
        (None, math.inf, {}, 2, [2]),  # the one before is cheaper than all before that
        (start(85), math.inf, {}, 2, [2]),
        (start(80), math.inf, {}, 99, []),  # no earlier one is cheaper than what is known
        (start(95), math.inf, {2: Executed(97, 0)}, 1, [2, 1]),
        (start(95), math.inf, {2: Executed(97, LIMIT + 1), 1: Executed(90, LIMIT)}, 1, [2, 1]),
        (None, math.inf, dict.fromkeys((2, 1, 0), Executed(70, LIMIT + 1)), None, [2, 1, 0]),
        (start(100), -math.inf, {}, 99, []),
        (None, -math.inf, {}, None, []),
    ],
)
def test_the_cheapest_executed(known, deadline, executions, expected, executed):
    search, incumbents, done = reported([100, 90, 80, 70], executions)
    search.best = known
    incumbents.execute_before_last(deadline)
    best = search.best
    assert (None if best is None else best.decision.layouts[0]) == expected
    assert done == executed


def test_not_all_of_many_are_executed():
    search, incumbents, done = reported(range(100, 0, -1), {k: Executed(1000, 0) for k in range(100)})
    incumbents.execute_before_last(math.inf)
    assert done == [98, 97, 96]
    assert search.best is not None
    assert search.best.executed.cost == 1000


def test_there_is_none_before_the_only_one():
    search, incumbents, done = reported([5], {})
    incumbents.execute_before_last(math.inf)
    assert search.best is None
    assert done == []


def two_assignments() -> tuple[StepProblem, tuple[int, ...], tuple[int, ...]]:
    """A problem, its optimum, and an assignment that costs more."""
    built = kiwi_chain_problem(random_step(1), None)
    with SolverPool() as pool:
        best = solve(built.problem, "brute_force", OPTIONS, None, pool).choices
    assert best is not None
    for i, node in enumerate(built.problem.nodes):
        for strategy in range(node.size):
            other = (*best[:i], strategy, *best[i + 1 :])
            is_another = built.decode(other) != built.decode(best)
            if is_another and cost_of(built, other) > cost_of(built, best):
                return built, best, other
    raise AssertionError("one of its strategies is allowed, and costs more")


def cost_of(built: StepProblem, choices: tuple[int, ...]) -> int:
    """Cost of an assignment, -1 where it is none."""
    report = check(built.problem, choices)
    return report.objective if report.ok and report.objective is not None else -1


@pytest.mark.parametrize("dearer", [0, 10**6])
def test_what_is_dear_when_executed_gives_way_to_the_one_before(dearer, monkeypatch):
    built, best, other = two_assignments()
    built = replace(built, restrictions=(), unlimited=None, rules=())
    costs = {choices: cost_of(built, choices) for choices in (best, other)}

    def search(
        searched: StepProblem, known: Candidate | None, context: SolveContext
    ) -> tuple[SolveResult, Candidate | None]:
        assert context.progress is not None
        for choices in (other, best):
            context.progress(Progress(0.0, costs[choices], None, "greedy", choices))
        cost = costs[best]
        found = SolveResult(Status.FEASIBLE, best, cost, cost, 0.0, "greedy", 0.0, 0.0, 0, (0,), proof=Proof.EXACT)
        return found, known

    def execute(decision: StepDecision) -> Executed:
        is_best = decision == built.decode(best)
        return Executed(costs[best] + dearer if is_best else costs[other], 0)

    monkeypatch.setattr(driver, "solve_with_restrictions", search)
    solved = solve_step(built, SolveContext(execute, "greedy", OPTIONS))
    assert isinstance(solved, SolvedStep)
    assert solved.decision == built.decode(other if dearer else best)
    assert solved.result.objective == (costs[other] if dearer else costs[best])
    assert solved.result.bound == costs[best]


def test_a_solve_reports_the_incumbents_that_it_checked():
    built = kiwi_chain_problem(random_step(1), None)
    lines: list[Progress] = []
    found = solve(built.problem, "tree_dp", OPTIONS, lines.append)
    told = [line for line in lines if line.choices is not None]
    assert told
    assert told[-1].choices == found.choices
    for line in told:
        assert cost_of(built, line.choices) == line.incumbent
    assert all(entry.choices is None for entry in found.history), "a history of many lines stays small"
