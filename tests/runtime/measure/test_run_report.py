"""When a run counts as failed, and what its table says."""

from __future__ import annotations

import pytest
from rich.console import Console
from support.steps.planned_steps import random_plan

from runtime.commands.tables.run import run_table
from runtime.measure.merged_report import merged_measurements, rank_measurements
from runtime.measure.run_report import MeasuredRank, RunReport
from runtime.measure.steps import Measurement

LIMIT = 1_000_000


def report(peak: int, limit: int | None = LIMIT, **checked: object) -> RunReport:
    nothing = {"reference_loss": None, "max_grad_rel_error": None, "max_param_rel_error": None}
    return RunReport(
        plan_digest="0",
        mesh=(2,),
        device="cpu",
        dtype="float32",
        steps=1,
        memory_limit_bytes=limit,
        predicted_peak_bytes=[LIMIT, LIMIT],
        measured_peak_bytes=[LIMIT // 2, peak],
        predicted_host_peak_bytes=[0, 0],
        measured_host_peak_bytes=[0, 0],
        resident_set_bytes=[0, 0],
        predicted_step_s=1.0,
        predicted_stall_s=0.0,
        measured_step_s=None,
        loss=[1.0],
        worst_gradient="",
        worst_parameter="",
        **(nothing | checked),
    )


@pytest.mark.parametrize(
    ("peak", "limit", "excess", "fails"),
    [
        (LIMIT, LIMIT, 0, False),
        (LIMIT + 1_000, LIMIT, 1_000, False),
        (LIMIT + 1_001, LIMIT, 1_001, True),
        (5 * LIMIT, None, 0, False),
    ],
)
def test_a_peak_above_the_memory_limit_is_a_failure(peak: int, limit: int | None, excess: int, fails: bool) -> None:
    found = report(peak, limit)
    assert found.excess_bytes == excess
    assert found.exit_code == len(found.failures()) == int(fails)
    if fails:
        assert found.failures() == [f"rank 1 needed {peak} bytes, the plan's memory limit is {LIMIT}"]


def test_the_limit_and_the_check_fail_side_by_side() -> None:
    found = report(2 * LIMIT, reference_loss=[1.1], max_grad_rel_error=float("inf"), max_param_rel_error=0.0)
    assert [failure.split()[0] for failure in found.failures()] == ["rank", "loss", "gradient"]
    assert RunReport.model_validate_json(found.model_dump_json()) == found


def rank_with(*seconds: float) -> MeasuredRank:
    measured = Measurement((2.0,) * (len(seconds) + 1), 8, 0, 9, seconds)
    return MeasuredRank(**rank_measurements(measured, {}))


def test_each_step_takes_as_long_as_on_its_slowest_rank() -> None:
    merged = merged_measurements([rank_with(1.0, 4.0, 3.0), rank_with(2.0, 3.0, 2.5)], None)
    assert merged["timed_steps_s"] == [2.0, 4.0, 3.0]
    assert merged["measured_step_s"] == 3.0  # the larger median of a rank
    alone = merged_measurements([rank_with()], None)
    assert alone["timed_steps_s"] == []
    assert alone["measured_step_s"] is None


def test_the_table_has_the_fastest_and_the_slowest_step() -> None:
    plan, console = random_plan("mlp", (2,), 0), Console(width=200, record=True, quiet=False)
    with console.capture() as captured:
        console.print(run_table(plan, report(LIMIT, timed_steps_s=[2.0, 4.0, 3.0])))
    (row,) = (line for line in captured.get().splitlines() if "of 3 steps" in line)
    assert "fastest, slowest" in row
    assert "2 s, 4 s" in row


@pytest.mark.parametrize(
    ("peak", "words"),
    [(LIMIT, "kept"), (LIMIT + 512, "kept but for 512 B, in the reserve"), (LIMIT + 2048, "exceeded by 2.00 KiB")],
)
def test_the_table_says_whether_the_limit_was_kept(peak: int, words: str) -> None:
    plan = random_plan("mlp", (2,), 0)
    console = Console(width=200, record=True, quiet=False)
    with console.capture() as captured:
        console.print(run_table(plan, report(peak)))
    (line,) = [line for line in captured.get().splitlines() if "memory limit" in line]
    assert words in line
