"""Galvatron-BMW's cases: stages, the paper's orders, chains."""

from __future__ import annotations

import pytest

from formulations.galvatron.slips import READINGS
from formulations.galvatron.stage import build_galvatron_stage
from formulations.problem.checker import check
from planner.papers.galvatron import paper_tables as paper
from planner.papers.galvatron.cases import BATCHES, VARIANT_SPACES, paper_chain
from planner.papers.galvatron.stages import algorithm_3, exact_labels, the_stage


def test_the_stage_is_the_same_for_all_searches() -> None:
    stage = the_stage("BERT-Huge-48", 8)
    problem = build_galvatron_stage(stage)
    problem.validate()
    assert len(problem.nodes) == 50
    exact = exact_labels(stage, 10.0)
    assert exact.bound <= exact.cost == check(problem, exact.choices).objective
    assert exact.cost <= exact.bound * (1 + 1e-4)
    for slips in READINGS.values():
        found = algorithm_3(slips, stage, 10.0)
        if found.choices is not None and stage.is_feasible(found.choices):
            assert exact.cost <= found.cost == check(problem, found.choices).objective


def test_cases_have_what_the_tables_ask_for() -> None:
    assert set(VARIANT_SPACES) == set(paper.VARIANTS)
    assert all(batch % 8 == 0 for batch in BATCHES)


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
