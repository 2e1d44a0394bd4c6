"""The suite galvatron: rows of a small cell, orders of variants, and the paper's figures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from formulations.galvatron.slips import AS_PRINTED
from formulations.galvatron.stage import build_galvatron_stage
from formulations.problem.checker import check_result
from formulations.problem.solution import SolveOptions, Status
from planner.benchmarks import Suite, SuiteError, bench
from planner.papers.galvatron import paper_tables as paper
from planner.papers.galvatron.bench import PARTS, SOLVERS, GalvatronCell, galvatron_suite
from planner.papers.galvatron.cases import BATCHES, VARIANT_SPACES, GalvatronCase, paper_chain
from planner.papers.galvatron.stages import stage_instances, the_stage
from planner.papers.galvatron.summary import UNITS_PER_SECOND, summary

BATCHES_OF_TESTS = (8, 32, 64)


def cell(variant: str, memory_gb: int = 12) -> GalvatronCell:
    return GalvatronCell(GalvatronCase("titan-rtx-8-pcie", "ViT-Huge-32", memory_gb, variant, batches=BATCHES_OF_TESTS))


@pytest.fixture(scope="module")
def rows():
    suite = Suite("small", tuple(cell(variant).instance() for variant in paper.VARIANTS), 60.0)
    return bench(suite).rows


def test_the_exact_plan_is_never_slower_and_its_gap_is_proven(rows) -> None:
    for variant in paper.VARIANTS:
        by_solver = {row.solver: row for row in rows if row.formulation == variant}
        assert tuple(by_solver) == SOLVERS
        exact = by_solver["exact"]
        assert exact.bound <= exact.objective
        assert exact.gap <= 0.001 + 1e-6
        for solver in SOLVERS[:-1]:
            if by_solver[solver].objective is not None:
                assert exact.objective <= by_solver[solver].objective
        assert not any(row.contradiction for row in by_solver.values())


def test_variants_order_as_in_the_paper(rows) -> None:
    lines = summary(rows)
    assert not [line for line in lines if line.startswith("order of the paper broken by repaired")]
    assert not [line for line in lines if line.startswith("order of the paper broken by exact")]
    assert sum("samples/s" in line for line in lines) == len(paper.VARIANTS)


def test_a_broken_order_is_told(rows) -> None:
    slow = [
        replace(row, objective=10 * UNITS_PER_SECOND) if row.formulation == "galvatron_bmw" and row.objective else row
        for row in rows
    ]
    assert any("broken by repaired" in line and "galvatron_bmw" in line for line in summary(slow))


def test_no_plan_is_proven_where_memory_forbids_all() -> None:
    instance = cell("galvatron_dp_tp", 1).instance()
    found = {row.solver: row for row in bench(Suite("none", (instance,), 30.0)).rows}
    assert found["exact"].status is Status.INFEASIBLE
    assert found["repaired"].status is Status.NO_SOLUTION


def test_published_plans_are_judged_by_the_repaired_costs() -> None:
    case = GalvatronCase("titan-rtx-8-pcie", "BERT-Huge-32", 8, "galvatron_1f1b_biobj", batches=(8, 16))
    published = case.search(AS_PRINTED).best
    row = next(row for row in bench(Suite("one", (GalvatronCell(case).instance(),), 60.0)).rows)
    fits = published is not None and row.status is Status.FEASIBLE
    assert fits or "does not fit" in row.message or "no plan found" in row.message


def test_the_stage_is_the_same_for_all_solvers() -> None:
    instance = next(instance for instance in stage_instances() if instance.load is not None)
    problem = instance.load()
    problem.validate()
    assert len(problem.nodes) == 50
    assert problem.resources == build_galvatron_stage(the_stage("BERT-Huge-48", 8)).resources
    for name, solver in instance.own_solvers.items():
        found = solver(SolveOptions(time_limit=10.0), lambda _: None, None)
        assert check_result(problem, found).ok, name
    labels = instance.own_solvers["labels"](SolveOptions(), lambda _: None, None)
    assert labels.status is Status.OPTIMAL
    assert labels.gap <= 1e-4


def test_parts_have_the_tables_of_the_paper() -> None:
    assert len(galvatron_suite().instances) == 6
    assert len(galvatron_suite(["table-2"]).instances) == 8 * 4 * 6
    assert len(galvatron_suite(["table-3"]).instances) == 2 * 6 * 2 * 6
    assert len(galvatron_suite(["table-4"]).instances) == 4 * 2
    assert len(galvatron_suite(["table-5"]).instances) == 2 * 2
    assert len(galvatron_suite(["stages"]).instances) == 8 * 4
    assert len(galvatron_suite(["figure-6"]).instances) == 4 * 5 + 3
    names = [instance.name for instance in galvatron_suite(list(PARTS)).instances]
    assert len(set(names)) == len(names)
    assert len(names) == sum(len(galvatron_suite([part]).instances) for part in PARTS) - 6  # small
    with pytest.raises(SuiteError, match="'table-1' is no part"):
        galvatron_suite(["table-1"])
    assert set(VARIANT_SPACES) == set(paper.VARIANTS)
    assert all(batch % 8 == 0 for batch in BATCHES)


def test_cells_with_other_batches_are_other_cells() -> None:
    """Figure 6 and Table III both have BERT-Huge-48 on 16 A100 with 16 GB, but not the same batches."""
    both = galvatron_suite(["table-3", "figure-6"]).instances
    names = [instance.name for instance in both if instance.name.startswith("a100-2x8-nvlink-16G-BERT-Huge-48")]
    assert len([name for name in names if name.endswith("-galvatron_bmw")]) == 2


def test_the_paper_orders_its_variants_in_every_cell() -> None:
    order = ("galvatron", "galvatron_base", "galvatron_bmw")
    for table in (paper.TABLE_2, paper.TABLE_3_TITAN, paper.TABLE_3_A100, paper.TABLE_5):
        for variants in table.values():
            for cells in zip(*(variants[name] for name in order), strict=True):
                rates = [entry[0] for entry in cells if entry not in (None, paper.OOM)]
                assert rates == sorted(rates)


def test_chains_have_the_activations_of_table_1() -> None:
    chain = paper_chain("BERT-Huge-48", "titan-rtx-8-pcie")
    assert len(chain) == 50
    assert chain.activation_bytes == pytest.approx(4657.51 * 2**20, rel=1e-3)
    assert all(layer.backward_workspace_bytes == 0 for layer in chain.layers)
