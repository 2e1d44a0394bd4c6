"""H3T's searches and cases: orders that must hold, the paper's columns, slower machines."""

from __future__ import annotations

import pytest

from formulations.h3t.free import solve_free
from formulations.h3t.problem import Optimizer, simulate
from formulations.problem.solution import SolveOptions, Status
from planner.papers.claims.results import kept_results, tables_of
from planner.papers.h3t import paper_tables as paper
from planner.papers.h3t.cases import H3tCase, table_1_cases
from planner.papers.h3t.free_tables import RANDOM_LAYERS, random_step
from planner.papers.h3t.searches import SEARCHES, exact, switch_shares, table_6_cases

GEFORCE = "rtx-2080ti-8-pcie"


def test_searches_of_a_small_batch_order_as_they_must() -> None:
    case = H3tCase(GEFORCE, "H3T-1.8B", 8, 6.0)
    best = exact(case)
    assert best.outcome is not None
    assert best.outcome.cost == best.bound
    found = {name: SEARCHES[name](case, SolveOptions()) for name in ("dp_published", "dp_up", "all_on", "uniform")}
    costs = {name: pair[1].cost for name, pair in found.items() if pair is not None}
    assert costs.keys() == found.keys()
    assert costs["uniform"] <= costs["all_on"]
    for name in ("dp_published", "dp_up"):
        assert found[name][1].peak > case.memory_limit or costs[name] >= best.outcome.cost
    assert SEARCHES["synchronized"](case, SolveOptions())[1].cost == best.outcome.cost


def test_a_limit_below_the_least_is_infeasible() -> None:
    assert exact(H3tCase(GEFORCE, "H3T-1.8B", 8, 0.1)).bound is None


def test_cases_have_the_papers_columns() -> None:
    assert [(case.cluster, case.model, case.batch) for case in table_1_cases()] == [*paper.COLUMNS]
    for row in (*paper.TABLE_1.values(), paper.TABLE_3):
        assert len(row) == len(paper.COLUMNS)
    assert set(table_6_cases()) == set(paper.TABLE_6) - {"greedy"}


def test_slower_machines_and_optimizers_change_what_they_should() -> None:
    case = table_1_cases()[0]
    plain = case.step().layers[0]
    slow_link = H3tCase(*paper.COLUMNS[0], 8.0, pcie_share=0.1).step().layers[0]
    slow_device = H3tCase(*paper.COLUMNS[0], 8.0, compute_share=0.1).step().layers[0]
    assert slow_link.gather > 9 * plain.gather
    assert slow_link.forward == plain.forward
    assert slow_device.forward == 10 * plain.forward
    assert slow_device.hidden_copy == plain.hidden_copy
    at_the_end = H3tCase(*paper.COLUMNS[0], 8.0, optimizer=Optimizer.AT_THE_END).step()
    assert at_the_end.final_cost == 48 * plain.update


def test_shares_of_switches() -> None:
    assert switch_shares([0, 127]) == [50.0] * 4
    assert switch_shares([1, 1]) == [0.0, 0.0, 100.0, 0.0]


def test_both_readings_of_the_optimizer_have_one_treatment_each() -> None:
    rows = kept_results("h3t").rows["optimizer"]
    assert {row["optimizer"] for row in rows} == {"overlapped", "at_the_end", "left_out"}
    exact = {(row["column"], row["optimizer"]): row for row in rows if row["solver"] == "exact"}
    for column, optimizer in exact:
        assert exact[column, "left_out"]["seconds"] <= exact[column, optimizer]["seconds"]


@pytest.mark.parametrize("layers", [each for each in RANDOM_LAYERS if each < 4])
def test_random_steps_have_plans_and_limits_that_bind(layers: int) -> None:
    step = random_step(layers, 0)
    assert simulate(step, (0,) * layers).peak > step.memory_limit
    found = solve_free(step, options=SolveOptions(time_limit=30.0))
    assert found.status is Status.OPTIMAL
    assert found.outcome is not None
    assert found.outcome.peak <= step.memory_limit


def test_labels_are_made_without_solving() -> None:
    tables = tables_of("h3t")
    assert len(list(tables["exact_free"].cells())) == 24
    assert len(list(tables["figure_6"].cells())) == 56
