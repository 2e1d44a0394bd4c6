"""Tables of the papers: baselines never beat the exact plan of the same problem; what inferred hardware changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from formulations.galvatron.slips import READINGS
from formulations.h3t.operations import ALL_ON
from formulations.h3t.problem import H3tError
from formulations.layers.pipeline_schedule import Schedule
from planner.machine.cluster import load_cluster
from planner.papers.capture.cases import CaptureCase
from planner.papers.capture.tables import plan_rows
from planner.papers.claims.results import kept_results
from planner.papers.galvatron import paper_tables as paper
from planner.papers.galvatron.cases import GalvatronCase
from planner.papers.galvatron.figure_7 import FIGURE_7
from planner.papers.galvatron.tables import BASELINES, TABLES, cell_rows
from planner.papers.h3t import paper_tables as h3t_paper
from planner.papers.h3t.cases import H3tCase, table_1_cases
from planner.papers.h3t.tables import ZERO, exact_within, uniform_outcome
from planner.papers.hardware import A100_TF32_FLOPS, H3T_PCIE_SHARE, Hardware, cluster_of
from planner.papers.osdp.tables import own_rows, pipeline_rows
from planner.plots import strips_of_plans

TITAN, A100 = "titan-rtx-8-pcie", "a100-2x8-nvlink"
CONTAINS = {
    "galvatron_dp_tp": ("ddp", "tp"),
    "galvatron_dp_pp": ("ddp", "gpipe"),
    "galvatron": ("ddp", "tp", "gpipe", "fsdp", "galvatron_dp_tp", "galvatron_dp_pp"),
    "galvatron_bmw": (*BASELINES, "galvatron_dp_tp", "galvatron_dp_pp", "galvatron"),
}
"""Rows of which each is a restriction of the variant."""


@pytest.mark.parametrize(
    ("cluster", "model", "memory_gb"),
    [
        (TITAN, "BERT-Huge-32", 12),
        pytest.param(TITAN, "Swin-Huge-32", 8, marks=pytest.mark.slow),
        pytest.param(TITAN, "T5-Large-48", 20, marks=pytest.mark.slow),
        pytest.param(A100, "ViT-Huge-48", 8, marks=pytest.mark.slow),
    ],
)
def test_galvatron_baselines_are_never_better_than_what_contains_them(cluster: str, model: str, memory_gb: int) -> None:
    case = GalvatronCase(cluster, model, memory_gb, "galvatron_bmw", batches=(8, 16, 32, 64), any_degree=True)
    rates = {row["strategy"]: row["rate"] or 0.0 for row in cell_rows(case, tuple(CONTAINS), seconds=5.0)}
    assert rates.keys() == {*BASELINES, *CONTAINS}
    assert rates["galvatron_bmw"] > 0
    for variant, contained in CONTAINS.items():
        for name in contained:
            assert rates[name] <= rates[variant] * (1 + 1e-12), (variant, name)


def test_the_partitions_of_figure_4_have_the_printed_balance() -> None:
    rows = {(row["hardware"], row["partition_name"]): row for cell in TABLES["figure_4"].cells() for row in cell.rows()}
    printed = {
        "memory_balanced": (0.625, 0.742, 29.957),
        "time_balanced": (0.750, 0.639, 38.145),
        "optimal": (0.688, 0.728, 35.223),
    }
    for name, (alpha_t, alpha_m, rate) in printed.items():
        row = rows["inferred", name]
        assert row["alpha_t"] == pytest.approx(alpha_t, rel=0.05)
        assert row["alpha_m"] == pytest.approx(alpha_m, rel=0.01)
        assert row["rate"] == pytest.approx(rate, rel=0.12)  # in TF32
        assert rows["preset", name]["rate"] < 0.4 * rate  # without it, a third


def test_a_row_has_every_search_and_the_exact_plan_begins_with_them() -> None:
    case = GalvatronCase(TITAN, "BERT-Huge-32", 8, "galvatron_bmw", batches=(8, 32), blocks=6, any_degree=True)
    rows = {row["strategy"]: row for row in cell_rows(case, ("galvatron", "galvatron_bmw"), 2.0)}
    assert rows["galvatron"]["printed_rate"] is None  # nothing is checkpointed
    for variant in ("galvatron", "galvatron_bmw"):
        found = [rows[variant][f"{name}_rate"] for name in READINGS]
        assert rows[variant]["rate"] >= max(rate for rate in found if rate is not None)


def test_runs_of_figure_7_are_the_layers_of_its_plans() -> None:
    kept = kept_results("galvatron").rows["figure_7"]
    assert {row["case"] for row in kept} == set(FIGURE_7)
    for row in kept:
        if row["runs"] is not None:
            problem = GalvatronCase(row["cluster"], row["model"], 8, "galvatron_bmw").problem()
            assert sum(count for stage in row["runs"] for count, _ in stage) == problem.layers
    drawn = [row for row in kept if row["case"] == "A" and row["runs"] is not None]
    assert len(drawn) >= 2
    figure = strips_of_plans({row["solver"]: row["runs"] for row in drawn}, "case A")
    (axes,) = figure.axes
    bars = [patch for patch in axes.patches if patch.get_width() >= 1]
    assert len(bars) == sum(len(stage) for row in drawn for stage in row["runs"])
    assert len(axes.lines) == sum(len(row["runs"]) - 1 for row in drawn)


def test_rates_of_the_paper_need_tf32_on_a100() -> None:
    """Six FLOP a parameter and token, and attention's products; the least that a step computes."""
    needed = {
        "BERT-Huge-32": (paper.TABLE_3_A100[16]["galvatron_bmw"][0][0] / 16, 32, 1280, 512),
        "ViT-Huge-32": (paper.TABLE_3_A100[16]["galvatron_bmw"][2][0] / 16, 32, 1280, 197),
        "ViT-xHuge": (paper.TABLE_5[32]["galvatron_bmw"][1][0] / 64, 128, 2560, 197),
    }
    flops = {
        model: rate * layers * tokens * (6 * 12 * hidden**2 + 12 * tokens * hidden)
        for model, (rate, layers, hidden, tokens) in needed.items()
    }
    assert {model: round(value / 1e12) for model, value in flops.items()} == {
        "BERT-Huge-32": 31,
        "ViT-Huge-32": 42,
        "ViT-xHuge": 62,
    }
    assert load_cluster(A100).device.flops["float32"] < min(flops.values())
    assert max(flops.values()) < A100_TF32_FLOPS
    assert cluster_of(A100, Hardware.INFERRED).device.flops["float32"] == A100_TF32_FLOPS
    assert cluster_of(TITAN, Hardware.INFERRED) == load_cluster(TITAN)


def test_the_inferred_link_makes_the_all_on_row_of_h3t() -> None:
    columns = dict(zip(h3t_paper.COLUMNS, table_1_cases(Hardware.INFERRED), strict=True))
    printed = dict(zip(h3t_paper.COLUMNS, h3t_paper.TABLE_1["all_on"], strict=True))
    for column in (h3t_paper.COLUMNS[2], h3t_paper.COLUMNS[5]):
        assert uniform_outcome(columns[column], ALL_ON).cost / 1e6 == pytest.approx(printed[column], rel=0.002)
    preset = dict(zip(h3t_paper.COLUMNS, table_1_cases(), strict=True))[h3t_paper.COLUMNS[2]]
    assert uniform_outcome(preset, ALL_ON).cost / 1e6 == pytest.approx(4.5, rel=0.02)
    assert replace(preset, pcie_share=H3T_PCIE_SHARE) == columns[h3t_paper.COLUMNS[2]]


@pytest.mark.parametrize("share", [1.0, H3T_PCIE_SHARE])
def test_zero_is_never_better_than_the_exact_plan_within_its_memory(share: float) -> None:
    case = H3tCase("rtx-2080ti-8-pcie", "H3T-1.8B", 64, 1000.0, pcie_share=share)
    peaks = {}
    for name, switches in ZERO.items():
        outcome = uniform_outcome(case, switches)
        exact = exact_within(case, outcome.peak).outcome
        assert exact is not None
        assert exact.cost <= outcome.cost
        assert exact.peak <= outcome.peak
        peaks[name] = outcome
    assert peaks["zero3"].peak < peaks["zero2"].peak  # parameters are not kept
    assert peaks["zero3"].cost >= peaks["zero2"].cost  # but gathered again
    all_on = uniform_outcome(case, ALL_ON)
    assert all_on.peak < peaks["zero3"].peak


def test_osdp_is_never_slower_than_what_it_contains() -> None:
    cluster, model = TITAN, "W&S-2x8192"
    own = {row["strategy"]: row["rate"] or 0.0 for row in own_rows(cluster, 16, model)}
    for formulation in ("osdp_base", "osdp", "osdp_peak_base", "osdp_peak", "osdp_checkpointing"):
        exact = own[f"{formulation}:knapsack"]
        assert exact >= max(own[f"{formulation}:replicated"], own[f"{formulation}:sharded"])
    assert own["osdp:knapsack"] >= own["osdp_base:knapsack"]
    assert own["osdp_peak:knapsack"] >= own["osdp_peak_base:knapsack"]
    rows = {row["strategy"]: row for row in pipeline_rows(cluster, 16, model, seconds=2.0)}
    rates = {name.removeprefix("pipeline:"): row["rate"] or 0.0 for name, row in rows.items()}
    assert not rows["pipeline:gpipe"]["applicable"]  # two blocks, eight stages
    assert rates["osdp"] >= max(rates["ddp"], rates["fsdp"])
    assert rates["3d_osdp"] >= rates["3d"]
    # Both models of FSDP agree: one is OSDP's equation, the other the estimator without overlap.
    assert rates["fsdp"] == pytest.approx(own["osdp_base:sharded"], rel=0.1)


@pytest.mark.parametrize("pipeline_only", [False, True])
@pytest.mark.parametrize("schedule", [Schedule.ONE_F_ONE_B, Schedule.GPIPE])
def test_capture_least_peak_is_below_alpa_and_below_the_published_choice(
    schedule: Schedule, pipeline_only: bool
) -> None:
    case = CaptureCase("GPT-3-2.6B", 1024, schedule, pipeline_only=pipeline_only)
    rows = {row["solver"]: row for row in plan_rows(case)}
    for solver in ("alpa", "published", "repaired"):
        assert rows["exact"]["peak_gb"] <= rows[solver]["peak_gb"]
    if not pipeline_only:
        assert max(row["rate"] for row in rows.values() if row["fits"]) == rows["alpa"]["rate"]


def test_gpt_3_has_the_printed_number_of_parameters() -> None:
    step = H3tCase("a100-8x8-nvlink", "GPT-3-175B", 512, 28.0).step()
    assert sum(layer.parameter_bytes for layer in step.layers) / 2 == pytest.approx(1.75e11, rel=0.01)
    with pytest.raises(H3tError, match="use 512"):
        H3tCase("a100-8x8-nvlink", "GPT-3-175B", 500, 28.0).step()
