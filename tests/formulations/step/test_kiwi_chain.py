"""KIWI reduced and KIWI with chains against the execution of every decision, on random steps."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
from support.steps.random_steps import decisions, random_step, reads_last_copies

from formulations.problem.checker import check, usage_profile
from formulations.problem.strategy_problem import StrategyProblem
from formulations.step.counting import Counting
from formulations.step.holds import shortest_holds
from formulations.step.kiwi_chain import (
    build_kiwi_chain,
    chain_moments,
    decode_kiwi_chain,
    encode_kiwi_chain,
    latest_moments,
)
from formulations.step.kiwi_reduced import build_kiwi_reduced, reduced_moments
from formulations.step.modes import Modes, once, once_or_twice
from formulations.step.recompute import RecomputeProblemBuilder
from formulations.step.replay import BrokenDecisionError, StepReplay, replay_decision
from formulations.step.sharding import build_sharding, within
from formulations.step.timeline import EventKind, Timeline, build_timeline
from formulations.step.training_step import StepDecision, StepModel


def replayed(model: StepModel, decision: StepDecision) -> StepReplay | None:
    try:
        return replay_decision(model, decision)
    except BrokenDecisionError:
        return None


def times_of(decided: Timeline, static: Timeline) -> list[int]:
    """Time in a problem's timeline of every time of a decision's."""
    position = {(event.kind, event.index): at for at, event in enumerate(static.events)}
    found = []
    for at, event in enumerate(decided.events):
        if event.kind is EventKind.RECOMPUTE:
            (slot,) = (slot for slot, position in decided.recompute[event.index].items() if position == at)
            there = static.recompute[event.index][slot]
        else:
            there = position[event.kind, event.index]
        length = decided.start[at + 1] - decided.start[at]
        found += range(static.start[there], static.start[there] + length)
    return found


def shares_no_gradient_storage(model: StepModel) -> bool:
    kept = [(edge.producer, edge.output) for edge in (*model.gradients, *model.results)]
    return len(set(kept)) == len(kept)


InSpace = Callable[[StepModel, StepDecision], bool]
"""Whether a decision belongs to a formulation."""


def keeps_rule_1(model: StepModel, decision: StepDecision) -> bool:
    again = decision.recomputed
    return not any(edge.producer in again and edge.consumer in again for edge in model.edges)


def of_modes(modes: Modes) -> InSpace:
    """Decisions of chains: reruns read the last copy alone of what may not run again twice."""
    twice = {i for i, of in modes.items() if any(len(mode) > 1 for mode in of)}
    return lambda model, decision: reads_last_copies(model, decision, but=twice)


def all_modes(model: StepModel) -> Modes:
    return once_or_twice(model, chain_moments(model))


def decisions_that_agree(model: StepModel, problem: StrategyProblem, modes: Modes, in_space: InSpace) -> int:
    """Compare every decision of one step with its replay; return how many can be executed."""
    problem.validate()
    static = build_timeline(model, {i: sorted({t for mode in of for t in mode}) for i, of in modes.items()})
    executable = 0
    for decision in decisions(model, modes):
        replay = replayed(model, decision) if in_space(model, decision) else None
        choices = shortest_holds(problem, encode_kiwi_chain(model, modes, decision))
        report = check(problem, choices)
        assert (replay is None) == bool(report.violations), decision
        if replay is None:
            continue
        executable += 1
        assert report.objective == replay.cost
        usage = usage_profile(problem, choices)[0]
        there = usage[times_of(replay.timeline, static)]
        if shares_no_gradient_storage(model):
            assert there.tolist() == replay.usage.tolist()
            assert usage.max() == replay.peak
        else:
            assert (there >= replay.usage).all()
    return executable


@pytest.mark.parametrize("start", range(0, 100, 25))
def test_every_decision_of_kiwi_reduced_replays(start: int) -> None:
    executable = []
    for seed in range(start, start + 25):
        model = random_step(seed)
        problem = build_kiwi_reduced(model, Counting.EXACT)
        executable.append(decisions_that_agree(model, problem, once(reduced_moments(model)), keeps_rule_1))
    assert sum(count > 0 for count in executable) > 12


@pytest.mark.parametrize("start", range(0, 100, 25))
def test_every_decision_of_kiwi_chain_replays(start: int) -> None:
    executable = []
    for seed in range(start, start + 25):
        model = random_step(seed)
        modes = once(chain_moments(model))
        problem = build_kiwi_chain(model, modes)
        executable.append(decisions_that_agree(model, problem, modes, of_modes(modes)))
    assert sum(count > 0 for count in executable) > 12


@pytest.mark.parametrize(("forward", "layouts", "seeds"), [(3, 2, range(200)), (4, 1, range(100)), (5, 1, range(60))])
def test_every_decision_of_reruns_once_or_twice_replays(forward: int, layouts: int, seeds: range) -> None:
    twice = 0
    for seed in seeds:
        model = random_step(seed, forward, layouts)
        modes = all_modes(model)
        if any(len(mode) > 1 for of in modes.values() for mode in of):
            twice += decisions_that_agree(model, build_kiwi_chain(model, modes), modes, of_modes(modes)) > 0
    assert twice > 15


@pytest.mark.parametrize("seed", range(200, 230))
def test_pairwise_counting_is_on_its_side_of_the_truth(seed: int) -> None:
    model = random_step(seed)
    modes = all_modes(model)
    in_space = of_modes(modes)
    over = RecomputeProblemBuilder(model, modes, Counting.OVER, chains=True).build("over")
    under = RecomputeProblemBuilder(model, modes, Counting.UNDER, chains=True).build("under")
    assert max(len(factor.scope) for factor in under.factors) <= 3
    for decision in decisions(model, modes):
        replay = replayed(model, decision) if in_space(model, decision) else None
        if replay is None:
            continue
        choices = encode_kiwi_chain(model, modes, decision)
        above = check(over, shortest_holds(over, choices))
        below = check(under, shortest_holds(under, choices))
        assert above.objective == below.objective == replay.cost
        assert below.peaks[0].usage <= replay.peak <= above.peaks[0].usage or not shares_no_gradient_storage(model)


@pytest.mark.parametrize("reach", [1, 2])
def test_a_shorter_reach_leaves_the_last_moments_and_those_of_given_plans(reach: int) -> None:
    for seed in range(300, 330):
        model = random_step(seed, forward=5, layouts=1)
        every = chain_moments(model)
        plan = latest_moments(model, dict.fromkeys(every))
        some = chain_moments(model, reach, [plan])
        assert some.keys() == every.keys()
        for i, moments in some.items():
            assert set(every[i][-reach:]) <= set(moments) <= set(every[i])
            assert i not in plan or plan[i] in moments


def best_by_replay(model: StepModel, limit: int, modes: Modes, in_space: InSpace) -> int | None:
    costs = [
        replay.cost
        for decision in decisions(model, modes)
        if in_space(model, decision) and (replay := replayed(model, decision)) is not None and replay.peak <= limit
    ]
    return min(costs, default=None)


def best_of_problem(problem: StrategyProblem) -> tuple[int, tuple[int, ...]] | None:
    found = []
    for choices in product(*(range(node.size) for node in problem.nodes)):
        report = check(problem, choices)
        if not report.violations:
            found.append((report.objective, choices))
    return min(found, default=None)


@pytest.mark.parametrize("seed", range(100, 116))
@pytest.mark.parametrize("share", [1.0, 0.8, 0.6])
def test_optimum_equals_the_best_execution(seed: int, share: float) -> None:
    model = random_step(seed, forward=2)
    chains, single = all_modes(model), once(reduced_moments(model))
    replays = [r for d in decisions(model, chains) if (r := replayed(model, d)) is not None]
    if not replays:
        pytest.skip("no decision of this step can be executed")
    limit = int(max(r.peak for r in replays) * share)
    plain = best_of_problem(within(build_sharding(model), limit))
    reduced = best_of_problem(within(build_kiwi_reduced(model, Counting.EXACT), limit))
    chain = best_of_problem(within(build_kiwi_chain(model), limit))
    if shares_no_gradient_storage(model):
        assert (chain and chain[0]) == best_by_replay(model, limit, chains, of_modes(chains))
        assert (reduced and reduced[0]) == best_by_replay(model, limit, single, keeps_rule_1)
    if reduced is not None:
        assert chain is not None
        assert chain[0] <= reduced[0]
        assert replay_decision(model, decode_kiwi_chain(model, single, reduced[1])).peak <= limit
    if plain is not None:
        assert reduced is not None
        assert reduced[0] <= plain[0]
    if chain is not None:
        assert replay_decision(model, decode_kiwi_chain(model, chains, chain[1])).peak <= limit


def test_moments_are_those_of_readers_up_to_the_own_first_use() -> None:
    for seed in range(400, 440):
        model = random_step(seed, forward=4)
        found = chain_moments(model)
        for i, moments in found.items():
            own = model.first_backward_use[i]
            readers = {
                moment
                for edge in model.edges_from[i]
                for moment in found.get(edge.consumer, ())
                if own < 0 or moment < own
            }
            assert moments == tuple(sorted(readers | ({own} if own >= 0 else set())))
