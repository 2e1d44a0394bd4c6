"""Operators that run again twice, and first copies that reruns read: what that is worth, against brute force."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from support.problems.kiwi_graphs import best_full, random_graph
from support.steps.random_steps import decisions, random_step, reads_last_copies

from formulations.kiwi.graph import KiwiEdge, KiwiGraph, KiwiOperator
from formulations.kiwi.schedule import StagedDecision
from formulations.kiwi.schedule import replay as replay_stages
from formulations.kiwi.training_step import step_model
from formulations.problem.solution import Status
from formulations.solvers import SolverPool, solve
from formulations.step.kiwi_chain import build_kiwi_chain, chain_moments, decode_kiwi_chain
from formulations.step.kiwi_reduced import reduced_moments
from formulations.step.modes import Modes, needed_reruns, once, once_or_twice
from formulations.step.replay import replay_decision
from formulations.step.sharding import within
from formulations.step.solving.registry import kiwi_chain_problem
from formulations.step.training_step import Moments, NodeKind, StepDecision, StepModel


def twice_of(modes: Modes) -> set[int]:
    return {i for i, of in modes.items() if any(len(mode) > 1 for mode in of)}


def stages_of(graph: KiwiGraph, decision: StepDecision) -> StagedDecision:
    """The same reruns as stages of the full problem."""
    stages = [[i] for i in range(graph.residents, len(graph.operators))]
    for i, moments in decision.recomputed.items():
        for moment in moments:
            stages[moment - graph.residents].append(i)
    return StagedDecision(decision.layouts, tuple(tuple(sorted(stage)) for stage in stages))


Executed = list[tuple[int, int]]
"""Cost and peak of decisions."""


def executed(model: StepModel, modes: Modes, *, chains: bool = True) -> Executed:
    """Execute all decisions of a formulation."""
    found = []
    for decision in decisions(model, modes):
        again = decision.recomputed
        if not chains and any(edge.producer in again and edge.consumer in again for edge in model.edges):
            continue
        if reads_last_copies(model, decision, but=twice_of(modes)):
            replay = replay_decision(model, decision)
            found.append((replay.cost, replay.peak))
    return found


def best(found: Executed, limit: int) -> int | None:
    """The least cost within a limit."""
    return min((cost for cost, peak in found if peak <= limit), default=None)


def small_limits(found: Executed) -> list[int]:
    """The smallest peaks, where it matters most what may be decided."""
    return sorted({peak for _, peak in found})[:4]


def row_of_operators(read_at: dict[int, int], amounts: list[int], costs: list[int]) -> KiwiGraph:
    """An input, forward and one more backward operators in a row; backward also reads what is given."""
    forward = len(amounts) // 2 - 1
    kinds = [NodeKind.INPUT] + [NodeKind.FORWARD] * forward + [NodeKind.BACKWARD] * (forward + 1)
    operators = tuple(
        KiwiOperator(f"{kind} {i}", kind, np.array([cost]), np.array([amount]))
        for i, (kind, cost, amount) in enumerate(zip(kinds, costs, amounts, strict=True))
    )
    pairs = [*((i - 1, i) for i in range(1, len(operators))), *read_at.items()]
    return KiwiGraph("by hand", operators, tuple(KiwiEdge(u, v, np.array([[0]])) for u, v in pairs))


def random_row(seed: int) -> KiwiGraph:
    """Four forward operators in a row, most of them read again in backward, the last one first."""
    rng = random.Random(seed)
    read_at = {u: 9 - u for u in range(1, 5) if rng.random() < 0.8}
    amounts = [0, *(rng.randint(0, 9) for _ in range(9))]
    return row_of_operators(read_at, amounts, [0, *(rng.randint(0, 5) for _ in range(9))])


def test_a_larger_space_never_costs_more_and_full_the_least() -> None:
    better = 0
    for seed in range(60):
        graph = random_row(seed) if seed % 3 else random_graph(seed, forward=4, most_strategies=1)
        model = step_model(graph)
        moments = chain_moments(model)
        twice = executed(model, once_or_twice(model, moments))
        smaller = [
            executed(model, once(moments)),
            executed(model, once(reduced_moments(model)), chains=False),
        ]
        for limit in small_limits(twice):
            costs = [best_full(graph, limit), *(best(found, limit) for found in (twice, *smaller))]
            known = [float("inf") if cost is None else cost for cost in costs]
            assert known == sorted(known)
            better += known[1] < known[2]
    assert better > 10


def test_reruns_once_or_twice_are_stages_of_the_full_problem() -> None:
    compared = 0
    for seed in range(40):
        graph = random_graph(seed, forward=4, most_strategies=1)
        model = step_model(graph)
        for decision in decisions(model, once_or_twice(model, chain_moments(model))):
            if needed_reruns(model, decision.recomputed) != decision.recomputed:
                continue
            executed, staged = replay_decision(model, decision), replay_stages(graph, stages_of(graph, decision))
            assert (executed.cost, executed.peak) == (staged.cost, staged.peak)
            compared += any(len(moments) > 1 for moments in decision.recomputed.values())
    assert compared > 100


def solved(model: StepModel, modes: Modes, limit: int, pool: SolverPool) -> tuple[int, dict[int, Moments]]:
    result = solve(within(build_kiwi_chain(model, modes), limit), "highs", pool=pool)
    assert result.status is Status.OPTIMAL
    assert result.choices is not None
    decision = decode_kiwi_chain(model, modes, result.choices)
    replay = replay_decision(model, decision)
    assert (replay.cost, (replay.peak,)) == (result.objective, result.peak_usage)
    return replay.cost, dict(decision.recomputed)


@pytest.mark.parametrize(
    ("amounts", "limit", "expected"),
    [
        ([0, 6, 6, 1, 12, 1, 2, 1], 14, {1: (6, 7), 2: (6,)}),
        ([0, 6, 9, 1, 7, 1, 2, 1], 16, {1: (7,), 2: (6,)}),
    ],
    ids=["runs again twice", "waits for the chain in its first copy"],
)
def test_what_a_chain_has_read_makes_room_and_runs_again(amounts, limit, expected, pool) -> None:
    """Backward reads operator 2 at 6 and operator 1 at 7; while 6 runs there is no room for both."""
    graph = row_of_operators({1: 7, 2: 6}, amounts, costs=[0, 2, 3, 100, 100, 100, 100, 100])
    model = step_model(graph)
    moments = chain_moments(model)
    twice = once_or_twice(model, moments)
    cost, reruns = solved(model, twice, limit, pool)
    assert reruns == expected
    assert cost == best(executed(model, twice), limit) == best_full(graph, limit)
    assert best(executed(model, once(moments)), limit) is None


@pytest.mark.slow
def test_the_optimum_is_that_of_all_decisions(pool) -> None:
    """On steps with operators that may run again twice."""
    tested = cheaper = 0
    for seed in range(120):
        model = step_model(random_row(seed)) if seed % 3 == 0 else random_step(seed, forward=4, layouts=1)
        modes = once_or_twice(model, chain_moments(model))
        if not twice_of(modes) or len({(e.producer, e.output) for e in model.gradients}) < len(model.gradients):
            continue
        found, before = executed(model, modes), executed(model, once(chain_moments(model)))
        for limit in [small_limits(found)[0] - 1, *small_limits(found)[:2]]:
            result = solve(within(build_kiwi_chain(model, modes), limit), "highs", pool=pool)
            expected = best(found, limit)
            assert result.objective == expected
            cheaper += expected is not None and expected != best(before, limit)
            tested += 1
    assert tested > 50
    assert cheaper > 5


def test_twice_runs_what_no_two_that_may_run_again_read() -> None:
    seen = 0
    for seed in range(60):
        model = random_step(seed, forward=4)
        moments = chain_moments(model)
        modes = once_or_twice(model, moments)
        for i, of in modes.items():
            assert of[: len(moments[i])] == tuple((moment,) for moment in moments[i])
            readers = [e.output for e in model.edges_from[i] if e.consumer in moments]
            pairs = of[len(moments[i]) :]
            if len(readers) == len(set(readers)):
                assert pairs == tuple((moment, moments[i][-1]) for moment in moments[i][:-1])
            seen += len(pairs)
    assert seen > 0


@pytest.mark.parametrize(("layouts", "twice"), [(2, True), (60, False)])
def test_a_large_problem_has_reruns_once(layouts: int, twice: bool) -> None:
    graph = row_of_operators({1: 7, 2: 6}, [1] * 8, [0] + [1] * 7)
    operators = tuple(
        replace(o, cost=np.repeat(o.cost, layouts), output_bytes=np.repeat(o.output_bytes, layouts))
        for o in graph.operators
    )
    edges = tuple(replace(e, cost=np.zeros((layouts, layouts), np.int64)) for e in graph.edges)
    built = kiwi_chain_problem(step_model(KiwiGraph("wide", operators, edges)), None)
    assert (built.problem.nodes[1].size > layouts * 4) == twice
