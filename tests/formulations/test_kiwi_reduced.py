"""KIWI reduced by hold nodes against a direct replay of the paper's rules, on random steps."""

from __future__ import annotations

from itertools import product

import pytest
from support.random_steps import decisions, random_step, replay_rules

from formulations.checker import check, usage_profile
from formulations.models.kiwi_reduced import build_kiwi_reduced, decode
from formulations.models.sharding import build_sharding
from formulations.models.step import StepModel
from formulations.problem import StrategyProblem


def choices_of(model: StepModel, decision) -> list[int]:
    return [(node.size if i in decision.recomputed else 0) + decision.layouts[i] for i, node in enumerate(model.nodes)]


def best_holds(problem: StrategyProblem, model: StepModel, choices: list[int]) -> list[int]:
    """Extend choices by the shortest holds that the forbidden entries allow."""
    extended = list(choices)
    for hold in range(len(model.nodes), len(problem.nodes)):
        allowed = [
            state
            for state in range(problem.nodes[hold].size)
            if not any(
                factor.scope[0] == hold
                and factor.forbidden is not None
                and factor.forbidden[state, extended[factor.scope[1]]]
                for factor in problem.factors
            )
        ]
        extended.append(allowed[0])
    return extended


def feasible_decisions_that_replay(seed: int) -> int:
    """Compare every decision of one step; return how many the rules allow."""
    model = random_step(seed)
    problem = build_kiwi_reduced(model, None)
    problem.validate()
    feasible = 0
    for decision in decisions(model):
        replayed = replay_rules(model, decision)
        choices = best_holds(problem, model, choices_of(model, decision))
        report = check(problem, choices)
        assert (replayed is None) == bool(report.violations), decision
        if replayed is not None:
            feasible += 1
            cost, usage = replayed
            assert report.objective == cost
            assert usage_profile(problem, choices)[0].tolist() == usage
            assert decode(model, tuple(choices)) == decision
    return feasible


@pytest.mark.parametrize("start", range(0, 120, 30))
def test_every_decision_replays_to_the_same_cost_and_memory(start: int) -> None:
    feasible = [feasible_decisions_that_replay(seed) for seed in range(start, start + 30)]
    assert sum(count > 0 for count in feasible) > 15


def best_by_rules(model: StepModel, limit: int, recompute: bool) -> int | None:
    costs = [
        replayed[0]
        for decision in decisions(model)
        if (recompute or not decision.recomputed)
        and (replayed := replay_rules(model, decision)) is not None
        and max(replayed[1]) <= limit
    ]
    return min(costs, default=None)


def best_of_problem(problem: StrategyProblem) -> int | None:
    costs = []
    for choices in product(*(range(node.size) for node in problem.nodes)):
        report = check(problem, choices)
        if not report.violations:
            costs.append(report.objective)
    return min(costs, default=None)


@pytest.mark.parametrize("seed", range(100, 112))
@pytest.mark.parametrize("share", [1.0, 0.8, 0.6])
def test_optimum_equals_the_rules_optimum(seed: int, share: float) -> None:
    model = random_step(seed, forward=2)
    peaks = [max(r[1]) for d in decisions(model) if (r := replay_rules(model, d)) is not None]
    limit = int(max(peaks) * share)
    assert best_of_problem(build_kiwi_reduced(model, limit)) == best_by_rules(model, limit, recompute=True)
    assert best_of_problem(build_sharding(model, limit)) == best_by_rules(model, limit, recompute=False)
