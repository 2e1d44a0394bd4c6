"""The replay of full KIWI decisions against a simulation, by hand, and against the canonical problems."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.problems.kiwi_graphs import (
    dropped_sets,
    extra_bytes,
    kept_bytes,
    one_pass,
    printed_usage,
    random_graph,
    strategies_by_cost,
    with_extras,
)

from formulations.kiwi.extras import Extra, Phase
from formulations.kiwi.graph import GraphError, KiwiEdge, KiwiGraph, KiwiOperator
from formulations.kiwi.schedule import ScheduleError, StagedDecision, in_order, replay, tidy, with_recomputed
from formulations.kiwi.training_step import step_model
from formulations.problem.checker import check
from formulations.problem.strategy_problem import StrategyProblem
from formulations.step.kiwi_reduced import build_kiwi_reduced
from formulations.step.sharding import build_sharding
from formulations.step.training_step import NodeKind


def operator(name: str, kind: NodeKind, cost: int, amount: int, stays: bool = False) -> KiwiOperator:
    return KiwiOperator(name, kind, np.array([cost]), np.array([amount]), stays)


def edge(producer: int, consumer: int, cost: int = 0) -> KiwiEdge:
    return KiwiEdge(producer, consumer, np.array([[cost]]))


def chain() -> KiwiGraph:
    """w -> a -> b -> c (backward, reads a, stays); a costs 5 and its resharding from w 2."""
    operators = (
        operator("w", NodeKind.PARAMETER, 0, 100),
        operator("a", NodeKind.FORWARD, 5, 10),
        operator("b", NodeKind.FORWARD, 7, 20),
        operator("c", NodeKind.BACKWARD, 1, 40, stays=True),
    )
    return KiwiGraph("chain", operators, (edge(0, 1, 2), edge(1, 2), edge(1, 3), edge(2, 3, 3)))


def test_a_replay_by_hand() -> None:
    once = replay(chain(), StagedDecision((0, 0, 0, 0), in_order(chain())))
    assert (once.cost, once.memory, once.peak) == (5 + 2 + 7 + 1 + 3, (110, 130, 170), 170)
    again = replay(chain(), StagedDecision((0, 0, 0, 0), ((1,), (2,), (1, 3))))
    assert (again.cost, again.memory) == (once.cost + 7, (110, 130, 130, 170))
    assert again.moments == ((0, 1), (1, 2), (2, 1), (2, 3))
    assert again.over(129) == [(1, 2), (2, 1), (2, 3)]


@pytest.mark.parametrize(
    ("strategies", "stages"),
    [
        ((0, 0, 0), ((1,), (2,), (3,))),
        ((0, 0, 1, 0), ((1,), (2,), (3,))),
        ((0, 0, 0, 0), ((1,), (2,))),
        ((0, 0, 0, 0), ((1,), (2,), (2,))),
        ((0, 0, 0, 0), ((1,), (2,), (2, 1, 3))),
        ((0, 0, 0, 0), ((1,), (0, 2), (3,))),
        ((0, 0, 0, 0), ((1,), (3, 2), (3,))),
    ],
)
def test_what_is_no_decision_is_refused(strategies: tuple[int, ...], stages: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(ScheduleError):
        replay(chain(), StagedDecision(strategies, stages))


def random_stages(graph: KiwiGraph, rng: random.Random) -> tuple[tuple[int, ...], ...]:
    first = graph.residents
    return tuple(
        (*(i for i in range(first, first + t) if rng.random() < 0.3 and not graph.operators[i].stays), first + t)
        for t in range(graph.stages)
    )


def simulate(graph: KiwiGraph, decision: StagedDecision) -> tuple[int, list[int]]:
    """Hold every version of a value as an interval [made, last read] and count what each moment is in."""
    order = [i for stage in decision.stages for i in stage]
    amounts = [int(o.output_bytes[s]) for o, s in zip(graph.operators, decision.strategies, strict=True)]
    costs = one_pass(graph, decision.strategies)
    intervals: list[list[int]] = []
    version: dict[int, list[int]] = {}
    for now, i in enumerate(order):
        for e in graph.edges:
            if e.consumer == i and e.producer >= graph.residents:
                version[e.producer][2] = max(now, version[e.producer][2])
        version[i] = [i, now, len(order) if graph.operators[i].stays else now]
        intervals.append(version[i])
    resident = sum(amounts[: graph.residents])
    kept, memory = kept_bytes(graph, decision.strategies), []
    for now, i in enumerate(order):
        beside = resident + sum(kept[j] for j in order[:now])
        held = {j: amounts[j] for j, made, last in intervals if made <= now <= last}
        on = {j: amounts[j] for j, made, last in intervals if made <= now < last}
        at_once = []
        for phase, there in (
            (Phase.BEFORE, {j: n for j, n in held.items() if j != i}),
            (Phase.DURING, held),
            (Phase.AFTER, on),
        ):
            for nbytes, freed in extra_bytes(graph, decision.strategies, i, phase):
                at_once.append(nbytes + sum(n for j, n in there.items() if j in on or j not in freed))
        memory.append(beside + max(at_once))
    return sum(costs[i] for i in order), memory


@pytest.mark.parametrize("seed", range(60))
def test_replay_equals_intervals_and_tidying_only_helps(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(seed, forward=4)
    graph = with_extras(graph, seed) if seed % 2 else graph
    for _ in range(10):
        strategies = tuple(rng.randrange(o.size) for o in graph.operators)
        decision = StagedDecision(strategies, random_stages(graph, rng))
        replayed = replay(graph, decision)
        assert (replayed.cost, list(replayed.memory)) == simulate(graph, decision)
        tidied = replay(graph, StagedDecision(strategies, tidy(graph, decision.stages)))
        assert tidied.cost <= replayed.cost
        assert tidied.peak <= replayed.peak
        assert tidy(graph, in_order(graph)) == in_order(graph)


def choices_of(
    problem: StrategyProblem, graph: KiwiGraph, strategies: tuple[int, ...], dropped: frozenset[int]
) -> list[int]:
    """Choices of a canonical problem: strategies, modes, and the shortest holds that its forbidden entries allow."""
    choices = [s + (graph.operators[i].size if i in dropped else 0) for i, s in enumerate(strategies)]
    for hold in range(len(choices), len(problem.nodes)):
        allowed = set(range(problem.nodes[hold].size))
        for factor in problem.factors:
            if factor.scope[0] == hold and factor.forbidden is not None:
                allowed &= set(np.flatnonzero(~factor.forbidden[:, choices[factor.scope[1]]]).tolist())
        choices.append(min(allowed))
    return choices


@pytest.mark.parametrize("seed", range(40))
def test_canonical_problems_have_the_same_costs_and_peaks(seed: int) -> None:
    rng = random.Random(seed)
    graph = random_graph(seed, forward=3)
    model = step_model(graph)
    sharding, reduced = build_sharding(model), build_kiwi_reduced(model)
    ranked = strategies_by_cost(graph)
    for cost, strategies in rng.sample(ranked, min(6, len(ranked))):
        plain = replay(graph, StagedDecision(strategies, in_order(graph)))
        report = check(sharding, strategies)
        assert (report.objective, report.peaks[0].usage) == (plain.cost, plain.peak) == (cost, plain.peak)
        assert printed_usage(graph, strategies, frozenset()) == list(plain.memory)
        for dropped in dropped_sets(graph):
            replayed = replay(graph, StagedDecision(strategies, with_recomputed(graph, tuple(dropped))))
            report = check(reduced, choices_of(reduced, graph, strategies, dropped))
            assert report.ok
            assert (report.objective, report.peaks[0].usage) == (replayed.cost, replayed.peak)
            # The paper counts what waits for a recomputation until the step that needs it has run as well.
            assert replayed.peak <= max(printed_usage(graph, strategies, dropped))


def test_a_graph_survives_as_text() -> None:
    graph = with_extras(random_graph(7), 7)
    again = KiwiGraph.from_json(graph.to_json())
    assert again.to_json() == graph.to_json()
    assert again.parents == graph.parents
    assert again.byte_unit == graph.byte_unit


def with_extra(*given: object) -> KiwiGraph:
    return KiwiGraph("bad", chain().operators, chain().edges, extras=(Extra(*given),))


def with_edge(bad: KiwiEdge) -> KiwiGraph:
    return KiwiGraph("bad", chain().operators, (bad,))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: KiwiGraph("bad", (operator("w", NodeKind.PARAMETER, 0, 1),), ()), "nothing is computed"),
        (lambda: KiwiGraph("bad", (operator("w", NodeKind.PARAMETER, 3, 1),), ()), "must be 0"),
        (lambda: KiwiGraph("bad", (operator("a", NodeKind.FORWARD, -1, 1),), ()), "non-negative"),
        (lambda: KiwiGraph("bad", (*chain().operators, operator("d", NodeKind.FORWARD, 1, 1)), ()), "order them"),
        (lambda: with_edge(edge(3, 1)), "before its consumer"),
        (lambda: with_edge(edge(1, 9)), "there are 4 operators"),
        (lambda: with_edge(edge(1, 2, -1)), "non-negative"),
        (lambda: with_extra(1, Phase.DURING, np.zeros(2, np.int64), {}), "each of its 1 strategies"),
        (lambda: with_extra(3, Phase.DURING, np.zeros(1, np.int64), {0: np.zeros((1, 1))}), "give an edge"),
        (lambda: with_extra(1, Phase.DURING, np.zeros(1, np.int64), {0: np.zeros((2, 1))}), "one per pair"),
        (lambda: with_extra(1, Phase.KEPT, np.zeros(1, np.int64), {}), "whose output stays"),
        (lambda: with_edge(KiwiEdge(1, 2, np.zeros((2, 1), np.int64))), "shape"),
    ],
)
def test_bad_graphs_are_named(make, words: str) -> None:
    with pytest.raises(GraphError, match=words):
        make()
