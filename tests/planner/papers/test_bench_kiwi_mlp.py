"""The suite ``kiwi-mlp`` and its instance, on a smaller perceptron, and by hand."""

from __future__ import annotations

import pytest
from support.problems.kiwi_graphs import random_graph, strategies_by_cost

from formulations.kiwi.mlp import SECONDS_PER_COST, MlpInstance
from formulations.kiwi.schedule import StagedDecision, in_order, replay
from formulations.kiwi.training_step import step_model
from formulations.problem.solution import Status
from formulations.solvers.processes.worker import SolverPool
from formulations.step.training_step import NodeKind
from planner.benchmarks import bench
from planner.papers import kiwi_mlp_suite
from planner.papers.kiwi.mlp import Unlimited, unlimited

SMALL = MlpInstance(devices=2, batch=512, widths=(256, 512, 128))


def test_the_papers_instance_has_its_26_operators() -> None:
    graph = MlpInstance().graph()
    assert graph.stages == 26
    assert [o.name for o in graph.operators[: graph.residents]] == ["x", *(f"W{k}" for k in range(7))]
    assert sum(o.stays for o in graph.operators) == 7
    assert sum(o.kind is NodeKind.FORWARD for o in graph.operators) == 7
    assert "8 devices" in str(MlpInstance())
    assert "1 GB/s" in str(MlpInstance())


def test_costs_and_bytes_by_hand() -> None:
    graph = SMALL.graph()
    names = [o.name for o in graph.operators]
    linear0 = graph.operators[names.index("linear0")]
    whole = SMALL.launch + 2 * 512 * 256 * 512 / SMALL.flops
    half = SMALL.launch + 256 * 512 * 512 / SMALL.flops
    gather = SMALL.latency + 512 * 512 * 4 / 2 / SMALL.bandwidth
    # Whole; split by batch; by what is summed over, to replicated, rows and columns; by outputs.
    seconds = [whole, half, half + 2 * gather, half + gather, half + gather, half]
    assert linear0.cost.tolist() == [round(s / SECONDS_PER_COST) for s in seconds]
    full = 512 * 512 * 4
    assert linear0.output_bytes.tolist() == [full, full // 2, full, full // 2, full // 2, full // 2]
    (from_x,) = [e for e in graph.edges if (e.producer, e.consumer) == (names.index("x"), names.index("linear0"))]
    exchange = SMALL.latency + 512 * 256 * 4 / 4 / SMALL.bandwidth
    collect = SMALL.latency + 512 * 256 * 4 / 2 / SMALL.bandwidth
    by_rows = [collect, 0, *[exchange] * 3, collect]
    assert from_x.cost[1].tolist() == [round(s / SECONDS_PER_COST) for s in by_rows]
    assert not from_x.cost[0].any()


@pytest.mark.parametrize("bad", [MlpInstance(devices=1), MlpInstance(widths=(8, 8))])
def test_an_instance_without_choices_is_refused(bad: MlpInstance) -> None:
    with pytest.raises(ValueError, match="at least two devices"):
        bad.graph()


def test_shares_are_of_the_smallest_peak_of_the_best_plans() -> None:
    several = 0
    with SolverPool() as pool:
        for seed in range(12):
            graph = random_graph(seed)
            best = strategies_by_cost(graph)[0][0]
            peaks = [
                replay(graph, StagedDecision(strategies, in_order(graph))).peak
                for cost, strategies in strategies_by_cost(graph)
                if cost == best
            ]
            assert unlimited(step_model(graph), pool) == Unlimited(best, min(peaks))
            several += len(set(peaks)) > 1
    assert several


def test_rows_are_ordered_by_what_formulations_may_do() -> None:
    suite = kiwi_mlp_suite(SMALL)
    assert any("2 devices" in note for note in suite.notes)
    result = bench(suite)
    assert result.contradictions() == []
    published = {"kiwi_full_published", "kiwi_reduced_published"}
    assert {row.formulation for row in result.rows} == {
        "kiwi_full",
        "kiwi_reduced",
        "kiwi_chain",
        "sharding",
    } | published
    for share in (20, 40, 60, 80):
        rows = {(r.formulation, r.solver): r for r in result.rows if f"-{share}%-" in r.instance}
        reduced = rows["kiwi_reduced", "staged"].objective
        assert reduced == rows["kiwi_reduced", "branch_and_bound"].objective
        assert rows["kiwi_full_published", "published"].objective == rows["kiwi_full", "staged"].objective
        counted = rows["kiwi_reduced_published", "published"].objective
        assert counted is None or counted >= reduced
        order = [
            rows[k].objective
            for k in (("kiwi_full", "staged"), ("kiwi_chain", "branch_and_bound"), ("kiwi_reduced", "branch_and_bound"))
        ]
        order.append(rows["sharding", "branch_and_bound"].objective)
        known = [cost for cost in order if cost is not None]
        assert known == sorted(known)
        assert order[len(known) :] == [None] * (len(order) - len(known))
        for row in rows.values():
            assert row.status in (Status.OPTIMAL, Status.INFEASIBLE)
            assert row.objective == row.bound
    assert suite.summarize is not None
    assert len(suite.summarize(result.rows)) == len({row.instance for row in result.rows if row.objective})
