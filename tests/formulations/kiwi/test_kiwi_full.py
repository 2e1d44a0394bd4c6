"""KIWI's full problem: published form, staged form and brute force find the same optimum, and infeasible agrees."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.problems.kiwi_graphs import (
    best_full,
    best_reduced_as_printed,
    greatest_peak,
    random_graph,
    with_extras,
)

from formulations.kiwi.configurations import configurations
from formulations.kiwi.extras import Extra, Phase
from formulations.kiwi.graph import KiwiEdge, KiwiGraph, KiwiOperator
from formulations.kiwi.schedule import StagedDecision, in_order, replay
from formulations.kiwi.solve import KiwiOptionsError, KiwiSolution, solve_kiwi
from formulations.kiwi.training_step import step_model
from formulations.problem.solution import SolveOptions, Status
from formulations.solvers import solve_in_process
from formulations.solvers.processes.worker import SolverPool
from formulations.step.kiwi_reduced import build_kiwi_reduced
from formulations.step.sharding import within
from formulations.step.training_step import NodeKind

SHARES = (0.9, 0.75, 0.65, 0.55)


def checked(graph: KiwiGraph, limit: int, formulation: str, pool: SolverPool) -> int | None:
    """Optimum of a formulation, its certificate and decision checked; None where nothing fits."""
    solution = solve_kiwi(graph, limit, formulation, pool=pool)
    result = solution.result
    if result.status is Status.INFEASIBLE:
        assert solution.decision is None
        return None
    assert result.status is Status.OPTIMAL, result
    assert solution.decision is not None
    replayed = replay(graph, solution.decision)
    assert replayed.cost == result.objective == result.bound
    assert (replayed.peak,) == result.peak_usage
    assert replayed.peak <= limit
    return result.objective


def compare(
    seed: int, forward: int, share: float, pool: SolverPool, *, extras: bool = False
) -> tuple[int | None, int | None]:
    """Assert that everything agrees on one instance; return the optima of the full and the reduced problem."""
    graph = with_extras(random_graph(seed, forward), seed) if extras else random_graph(seed, forward)
    limit = int(greatest_peak(graph) * share)
    full, reduced = best_full(graph, limit), best_reduced_as_printed(graph, limit)
    assert checked(graph, limit, "kiwi_full", pool) == full
    assert checked(graph, limit, "kiwi_full_published", pool) == full
    assert checked(graph, limit, "kiwi_reduced_published", pool) == reduced
    if reduced is not None:
        assert full is not None
        assert full <= reduced
    return full, reduced


@pytest.mark.fast_cases("0.75")
@pytest.mark.parametrize("share", SHARES)
def test_all_forms_find_the_optimum(share: float, pool: SolverPool) -> None:
    found = [compare(seed, 3, share, pool) for seed in range(25)]
    assert any(full is not None for full, _ in found)
    if share < max(SHARES):
        assert any(full is None for full, _ in found)


@pytest.mark.fast_cases("0.75")
@pytest.mark.parametrize("share", SHARES)
def test_all_forms_count_copies_and_workspaces(share: float, pool: SolverPool) -> None:
    changed = 0
    for seed in range(6):
        full, _ = compare(seed, 3, share, pool, extras=True)
        changed += full != best_full(
            random_graph(seed), int(greatest_peak(with_extras(random_graph(seed), seed)) * share)
        )
    assert changed, "some decision that fits the paper's count does not fit with them"


@pytest.mark.parametrize(("seed", "share"), [(1000, 0.7), (1000, 0.62), (1012, 0.62), (1037, 0.55)])
def test_the_full_problem_is_richer_than_the_reduced_one(seed: int, share: float, pool: SolverPool) -> None:
    full, reduced = compare(seed, 4, share, pool)
    assert full is not None
    assert reduced is None or full < reduced


@pytest.mark.parametrize(
    ("seed", "share"), [(5021, 0.55), (5061, 0.62), (5076, 0.9), (6202, 0.55), (6221, 0.7), (6221, 0.9)]
)
def test_where_presolve_went_wrong(seed: int, share: float, pool: SolverPool) -> None:
    compare(seed, 3, share, pool)


@pytest.mark.fuzz
@pytest.mark.parametrize("start", range(0, 800, 50))
def test_all_forms_find_the_optimum_on_many(start: int, pool: SolverPool) -> None:
    for seed in range(start, start + 50):
        compare(10_000 + seed, 3 + seed % 2, SHARES[seed % len(SHARES)], pool)


@pytest.mark.parametrize("seed", range(30))
def test_true_liveness_never_costs_more_than_the_paper_counts(seed: int, pool: SolverPool) -> None:
    graph = random_graph(seed)
    for share in SHARES:
        limit = int(greatest_peak(graph) * share)
        direct = solve_in_process(within(build_kiwi_reduced(step_model(graph)), limit), "brute_force").objective
        assert checked(graph, limit, "kiwi_reduced", pool) == direct
        printed, full = best_reduced_as_printed(graph, limit), best_full(graph, limit)
        assert printed is None or (direct is not None and direct <= printed)
        assert direct is None or (full is not None and full <= direct)


def test_a_limit_holds_to_the_byte(pool: SolverPool) -> None:
    """At the optimum's own peak it stays optimal, one byte below it costs more or is gone."""
    changed = 0
    for seed in range(40, 52):
        graph = random_graph(seed)
        free = solve_kiwi(graph, None, pool=pool).result
        peak = free.peak_usage[0]
        assert checked(graph, peak, "kiwi_full", pool) == free.objective
        below = checked(graph, peak - 1, "kiwi_full", pool)
        assert below == best_full(graph, peak - 1)
        changed += below != free.objective
    assert changed


def test_huge_amounts_are_told_apart_by_one_byte(pool: SolverPool) -> None:
    """Doubles cannot hold these rows to a byte: covers of what was found too large are cut off."""
    for seed in range(60, 72):
        small = random_graph(seed)
        operators = tuple(replace(o, output_bytes=o.output_bytes + 10**15) for o in small.operators)
        graph = KiwiGraph("huge", operators, small.edges)
        limit = greatest_peak(graph) - 1
        assert checked(graph, limit, "kiwi_full", pool) == best_full(graph, limit)


@pytest.mark.parametrize(("seed", "share"), [(100, 0.7), (108, 0.7), (205, 0.6)])
def test_recomputations_over_the_limit_are_added_when_found(seed: int, share: float, pool: SolverPool) -> None:
    graph = random_graph(seed, forward=4)
    limit = int(share * greatest_peak(graph))
    result = solve_kiwi(graph, limit, pool=pool).result
    assert int(result.message.rpartition("round ")[2].partition(";")[0]) > 1
    assert result.objective == best_full(graph, limit)


def test_without_a_limit_everything_runs_once(pool: SolverPool) -> None:
    for seed in range(5):
        graph = random_graph(seed)
        solution = solve_kiwi(graph, None, pool=pool)
        assert solution.decision is not None
        assert solution.result.objective == best_full(graph, graph.most_bytes)
        cost = replay(graph, StagedDecision(solution.decision.strategies, in_order(graph))).cost
        assert cost == solution.result.objective


def test_one_operator(pool: SolverPool) -> None:
    graph = random_graph(3, forward=1, backward=0)
    assert len(in_order(graph)) == 1
    limit = graph.most_bytes
    assert checked(graph, limit, "kiwi_full", pool) == best_full(graph, limit)
    nothing = min(int(o.output_bytes.min()) for o in graph.operators[graph.residents :]) - 1
    if nothing >= 0:
        assert checked(graph, nothing, "kiwi_full", pool) is None


def test_what_makes_no_sense_is_refused() -> None:
    graph = random_graph(0)
    for keywords, words in (
        ({"formulation": "kiwi_half"}, "kiwi_half"),
        ({"memory_limit": -1}, "-1 is negative"),
        ({"options": SolveOptions(time_limit=0.0)}, "time_limit"),
    ):
        with pytest.raises(KiwiOptionsError, match=words):
            solve_kiwi(graph, **({"memory_limit": 5} | keywords))


def test_a_short_time_leaves_a_true_certificate(pool: SolverPool) -> None:
    solution: KiwiSolution = solve_kiwi(
        random_graph(5, forward=8, most_strategies=3), 40, options=SolveOptions(time_limit=0.02), pool=pool
    )
    assert solution.result.status in set(Status)
    if solution.result.objective is not None and solution.result.bound is not None:
        assert solution.result.bound <= solution.result.objective


def test_a_workspace_alone_tells_strategies_apart(pool: SolverPool) -> None:
    operators = (
        KiwiOperator("x", NodeKind.INPUT, np.array([0]), np.array([1])),
        KiwiOperator("a", NodeKind.FORWARD, np.array([1, 2]), np.array([3, 3])),
    )
    workspace = Extra(1, Phase.DURING, np.array([5, 0]), {})
    graph = KiwiGraph("two", operators, (KiwiEdge(0, 1, np.array([[0, 0]])),), extras=(workspace,))
    for formulation in ("kiwi_full", "kiwi_full_published", "kiwi_reduced_published"):
        assert [checked(graph, limit, formulation, pool) for limit in (9, 8, 3)] == [1, 2, None]


@pytest.mark.parametrize("limit", [9, 10])
def test_an_input_that_a_later_rerun_reads_is_not_freed_for_a_copy(limit: int, pool: SolverPool) -> None:
    """Between forward and backward nothing fits beside ``m``: ``b`` and ``c`` run again, which both read ``a``.

    While ``b`` does, there are ``a``, its copy and ``b``, as ``c`` follows: 4 + 4 + 2 bytes. In the forward pass ``a``
    may run again for ``c``, so that less is held there.
    """
    amounts = {"x": 0, "a": 4, "b": 2, "c": 2, "m": limit, "z": 1}
    kinds = {"x": NodeKind.INPUT, "z": NodeKind.BACKWARD}
    names = list(amounts)
    operators = tuple(
        KiwiOperator(name, kinds.get(name, NodeKind.FORWARD), np.array([int(name != "x")]), np.array([nbytes]))
        for name, nbytes in amounts.items()
    )
    edges = tuple(
        KiwiEdge(names.index(i), names.index(j), np.array([[0]])) for i, j in ("xa", "ab", "ac", "xm", "bz", "cz")
    )
    copy = Extra(2, Phase.DURING, np.array([0]), {1: np.array([[4]])}, {1: np.array([[True]])})
    graph = KiwiGraph("two readers", operators, edges, extras=(copy,))
    expected = best_full(graph, limit)
    assert (expected is None) == (limit < 10)
    assert checked(graph, limit, "kiwi_full", pool) == expected


def test_configurations_pick_the_best_strategy_of_a_class() -> None:
    for seed in range(20):
        graph = random_graph(seed, most_strategies=3)
        found = configurations(graph)
        for i, table in enumerate(found.tables):
            for entry in table.entries:
                chosen = {j: found.classes[j][c][0] for j, c in zip(table.neighbours, entry.others, strict=True)}
                costs = [
                    int(graph.operators[i].cost[s])
                    + sum(int(e.cost[chosen[e.producer], s]) for e in graph.edges_into[i])
                    for s in found.classes[i][entry.own]
                ]
                assert entry.cost == min(costs)
                assert entry.strategy in found.classes[i][entry.own]
            members = sorted(s for of in found.classes[i] for s in of)
            assert members == list(range(graph.operators[i].size))
            for of in found.classes[i]:
                assert len({int(graph.operators[i].output_bytes[s]) for s in of}) == 1
                assert all(np.array_equal(e.cost[of[0]], e.cost[s]) for e in graph.edges_from[i] for s in of)
