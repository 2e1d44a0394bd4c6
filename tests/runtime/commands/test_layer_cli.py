"""Plans of layers on the command line: planned, explained, and shown beside what a run measured."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from support.layers.layer_plan_models import configuration_file
from support.layers.layer_runs import staged_plan

from planner.layers.plan.document import load_layer_plan, save_layer_plan
from runtime.commands import main as cli
from runtime.commands.tables.layers import run_table
from runtime.layers.report import LayerRunReport

DROPOUT = "0.1"


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A plan file, and what was printed when it was made."""
    folder = tmp_path_factory.mktemp("layers")
    path, arguments = folder / "layers.json", ["--cluster", "titan-rtx-8-pcie", "--batch", "8", "--seq", "16"]
    arguments += ["--mesh", "2", "--model-formulation", "galvatron", "--dropout", DROPOUT, "--out", str(path)]
    with pytest.MonkeyPatch.context() as patch:
        printed: list[str] = []
        patch.setattr("typer.echo", lambda text="", **_: printed.append(str(text)))
        with pytest.raises(SystemExit) as left:
            cli.main(["plan", f"hf:{configuration_file('gpt2')}", *arguments])
    assert not left.value.code
    return path, "\n".join(printed)


def test_a_plan_says_what_the_engine_holds_and_explain_says_it_again(planned, meshwright):
    path, printed = planned
    plan = load_layer_plan(path)
    (peak,) = plan.record.engine_peaks
    assert peak.nbytes == sum(peak.parts.values()) > 0
    assert f"at {peak.moment} (states " in printed
    assert "predicted peaks by stage" in printed
    stage = "stage 0: embedding .. head (4 layers): 2 replicas"
    assert stage in printed
    assert stage in meshwright("explain", path, "--time-limit", "2").out


def test_a_plan_that_needs_more_than_there_is_says_so(planned):
    plan = load_layer_plan(planned[0])
    assert "more than there is" not in plan.summary()
    least = plan.record.model_copy(update={"tensor_bytes": plan.record.engine_peaks[0].nbytes - 1})
    assert "that is more than there is" in plan.model_copy(update={"record": least}).summary()


def test_a_run_is_shown_beside_both_predictions(planned):
    plan = load_layer_plan(planned[0])
    counted, held = plan.record.stage_peak_bytes[0], plan.record.engine_peaks[0].nbytes
    report = LayerRunReport(
        devices=2, stages=1, micro_batches=1, device="cpu", dtype="float32", steps=2, measured_peak_bytes=[held, held],
        measured_host_peak_bytes=[0, 0], resident_set_bytes=[0, 0], measured_step_s=1.0, loss=[2.0, 1.0],
        reference_loss=[2.0, 1.0], max_grad_rel_error=1e-7, worst_gradient="w", uncompared=[],
    )  # fmt: skip
    console = Console(record=True, width=200)
    console.print(run_table(plan, report))
    text = console.export_text()
    assert f"{held / counted:.3f}, 1.000" in text
    assert "loss of step 2" in text
    by_hand = plan.model_copy(update={"record": None})
    console.print(run_table(by_hand, report))
    assert "1.000" not in console.export_text().partition("loss")[0]


def test_a_plan_that_cannot_be_run_says_why_when_it_is_made(monkeypatch, tmp_path, meshwright):
    plan = staged_plan("gpt2", [{"tensor_parallel": 2}] * 4, devices=2)
    dropped = plan.model_copy(update={"model": plan.model.model_copy(update={"dropout": 0.1})})
    monkeypatch.setattr("planner.planning.plan_layers", lambda *_, **__: dropped)
    arguments = ["--mesh", "2", "--cluster", "titan-rtx-8-pcie", "--model-formulation", "osdp"]
    outcome = meshwright("plan", dropped.model.source, *arguments, "--out", tmp_path / "layers.json")
    assert "note: this plan cannot be run here: layer embedding: tensor-parallel 2" in outcome.out


def test_a_plan_of_layers_has_one_way_to_be_started_by_torchrun(monkeypatch, tmp_path, meshwright):
    save_layer_plan(staged_plan("gpt2", [{"data_parallel": 2}] * 4, devices=2), tmp_path / "layers.json")
    monkeypatch.setenv("WORLD_SIZE", "2")
    outcome = meshwright("run", tmp_path / "layers.json")
    assert outcome.code == 2
    assert "torchrun starts those with -m runtime.layer_main" in outcome.err
