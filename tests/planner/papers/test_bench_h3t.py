"""The suite ``h3t``: the paper's models and machines, and what its rows claim."""

from __future__ import annotations

from dataclasses import replace

import pytest

from formulations.h3t.problem import Optimizer
from formulations.problem.solution import SolveOptions, Status
from planner.benchmarks import bench
from planner.benchmarks.suites import Suite, SuiteError
from planner.papers.h3t import paper_tables as paper
from planner.papers.h3t.bench import (
    FREE,
    PARTS,
    SYNCHRONIZED,
    h3t_suite,
    instances_of,
    summary,
    switch_shares,
    table_6_cases,
)
from planner.papers.h3t.cases import H3tCase, table_1_cases

GEFORCE = "rtx-2080ti-8-pcie"


def test_rows_of_a_small_batch() -> None:
    wanted = ("dp_published", "dp_up", "exact", "all_on", "uniform", "synchronized")
    instances = [
        replace(each, own_solvers={name: solver for name, solver in each.own_solvers.items() if name in wanted})
        for each in instances_of(H3tCase(GEFORCE, "H3T-1.8B", 8, 6.0), "paper: nothing")
    ]
    result = bench(Suite("h3t", tuple(instances), 10.0, solvers=("highs",)))
    assert result.contradictions() == []
    rows = {(row.formulation, row.solver): row for row in result.rows}
    exact = rows[SYNCHRONIZED, "exact"]
    assert exact.status is Status.OPTIMAL
    for (formulation, _), row in rows.items():
        if row.objective is not None and formulation == SYNCHRONIZED:
            assert row.objective >= exact.objective
    assert rows[FREE, "synchronized"].objective == exact.objective
    assert rows[FREE, "uniform"].objective <= rows[FREE, "all_on"].objective
    (line,) = summary(result.rows)
    assert line.index("synchronized") < line.index("all_on")


def test_a_limit_below_the_least_is_infeasible_and_the_least_is_named() -> None:
    (synchronized, _) = instances_of(H3tCase(GEFORCE, "H3T-1.8B", 8, 0.1))
    result = synchronized.own_solvers["exact"](SolveOptions(), lambda _: None, None)
    assert result.status is Status.INFEASIBLE
    assert "needs at least" in result.message


def test_every_part_has_the_papers_columns() -> None:
    assert [(case.cluster, case.model, case.batch) for case in table_1_cases()] == [*paper.COLUMNS]
    for row in (*paper.TABLE_1.values(), paper.TABLE_3):
        assert len(row) == len(paper.COLUMNS)
    assert set(table_6_cases()) == set(paper.TABLE_6) - {"greedy"}
    assert len(h3t_suite().instances) == 2 * len(paper.COLUMNS)
    names = [instance.name for instance in h3t_suite([part for part in PARTS if part != "figure-6"]).instances]
    assert len(set(names)) == len(names)
    assert sum("pcie-x" in name for name in names) == 2 * 5
    with pytest.raises(SuiteError, match="'table-2' is no part"):
        h3t_suite(["table-2"])


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
