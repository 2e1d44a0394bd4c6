"""``--json`` means the same for every command: its result as JSON, and - is standard output with nothing else on it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.layers.layer_runs import staged_plan
from support.processes.command_line import TINY_PROBLEM
from support.steps.planned_steps import configuration_file

from planner.layers.plan.document import save_layer_plan
from planner.machine.cluster import load_cluster
from runtime.commands import doctor
from runtime.commands import main as cli
from runtime.measure.run_report import RunReport
from runtime.prediction.validation import ValidatedPlan, Validation

LAYER_PLAN = Path(__file__).parents[2] / "fixtures" / "plans" / "galvatron.json"
STEP = [
    f"hf:{configuration_file('gpt2')}",
    *("--cluster", "a100-8-nvlink", "--layers", "1", "--seq", "16", "--dropout", "0", "--time-limit", "10"),
]
QUICK = [*STEP, "--solver", "lagrangian"]
REPORT = RunReport(
    plan_digest="0",
    mesh=(2,),
    device="cpu",
    dtype="float32",
    steps=1,
    memory_limit_bytes=None,
    predicted_peak_bytes=[8, 8],
    measured_peak_bytes=[8, 8],
    predicted_host_peak_bytes=[0, 0],
    measured_host_peak_bytes=[0, 0],
    resident_set_bytes=[0, 0],
    predicted_step_s=1.0,
    predicted_stall_s=0.0,
    measured_step_s=None,
    loss=[1.0],
    reference_loss=None,
    max_grad_rel_error=None,
    max_param_rel_error=None,
    worst_gradient="",
    worst_parameter="",
)

CASES = {
    "plan": ([*QUICK, "--batch", "2", "--mesh", "2", "--out", "made.json"], {"status", "objective_seconds", "out"}),
    "run": (["plan.json", "--steps", "1"], {"measured_peak_bytes", "loss"}),
    "explain": (["plan.json", "--time-limit", "1"], {"sections"}),
    "compare": (["plan.json", "layers.json"], {"title", "rows", "notes"}),
    "export": (["parallel.json", "--out", "made.py"], {"engine", "left_out", "out"}),
    "view": (["layers.json", "--no-open", "--out", "made.html"], {"out"}),
    "fits": ([*STEP[:-2], "--mesh", "2"], {"rows", "ranks"}),
    "best-mesh": ([*QUICK, "--ranks", "1", "--batch", "2"], {"mesh", "plan", "rows"}),
    "largest-batch": ([*QUICK, "--mesh", "1", "--most", "2", "--out", "largest.json"], {"batch", "plan", "rows"}),
    "whatif": ([*QUICK, "--mesh", "1", "--batch", "2", "--flops", "2"], {"plan", "rows"}),
    "price": ([*QUICK, "--mesh", "1", "--batch", "2", "--at", "40GiB"], {"rows"}),
    "sweep": ([*QUICK, "--mesh", "1", "--batch", "2", "--folder", "rows"], {"title", "rows", "notes"}),
    "solve": (["tiny.json", "--solver", "brute_force", "--out", "solved.json"], {"status", "objective", "bound"}),
    "bench": (["contest", "tiny.json", "--solvers", "brute_force"], {"instance", "solver", "objective"}),
    "bench ablate": (["--list"], {"module", "name", "value"}),
    "bench export": (["tiny.json", "--out", "problems"], {"files"}),
    "calibrate": ([], {"flops", "memory_bandwidth", "out"}),
    "validate": (["plan.json"], {"plans", "mean_time_error"}),
    "doctor": ([], {"name", "state", "remedy"}),
}
"""Arguments of each command, and some keys of its result, or of the first entry where that is a list."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("json")
    (path / "tiny.json").write_text(json.dumps(TINY_PROBLEM))
    save_layer_plan(staged_plan("gpt2", [{"data_parallel": 2}] * 4, devices=2), path / "parallel.json")
    (path / "layers.json").write_text(LAYER_PLAN.read_text())
    with pytest.raises(SystemExit) as left:
        cli.main(["plan", *QUICK, "--batch", "2", "--mesh", "2", "--out", str(path / "plan.json")])
    assert not left.value.code
    return path


@pytest.fixture(autouse=True)
def _nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand in for runs of processes, of which other tests are."""
    validation = Validation((ValidatedPlan("plan.json", 1.0, 1.1, 8, 8),))
    monkeypatch.setattr("runtime.job.launch.run_plan", lambda *_, **__: REPORT)
    monkeypatch.setattr("runtime.prediction.validation.validate", lambda *_, **__: validation)
    monkeypatch.setattr("runtime.calibration.calibrate.calibrate", lambda *_: load_cluster("a100-8-nvlink"))
    found = [doctor.Finding("gpu", doctor.State.OPTIONAL, "none", "none is needed")]
    monkeypatch.setattr(doctor, "examine", lambda: iter(found))


def test_every_command_is_here() -> None:
    assert set(CASES) == {name for name, _ in cli.COMMANDS.values()}


@pytest.mark.parametrize("name", CASES)
def test_a_result_is_one_document_on_standard_output(
    meshwright, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(folder)
    arguments, keys = CASES[name]
    outcome = meshwright(*name.split(), *arguments, "--json", "-")
    assert outcome.code == 0, outcome.err
    document = json.loads(outcome.out)
    assert keys <= (document[0] if isinstance(document, list) else document).keys()
    assert not (folder / "-").exists()


def test_a_file_has_the_same_and_texts_stay_on_standard_output(
    meshwright, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    printed = meshwright("compare", "plan.json", "layers.json")
    outcome = meshwright("compare", "plan.json", "layers.json", "--json", "compared.json")
    assert outcome.out == printed.out
    alone = meshwright("compare", "plan.json", "layers.json", "--json", "-")
    assert alone.out == (folder / "compared.json").read_text()
    assert alone.err == printed.out


def test_an_option_without_a_file_is_standard_output(meshwright, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    wanted = meshwright("doctor", "--json", "-").out
    assert json.loads(wanted)[0]["name"] == "gpu"
    assert meshwright("doctor", "--json").out == wanted
    assert json.loads(meshwright("bench", "ablate", "--json", "--list").out)
    assert json.loads(meshwright("run", "plan.json", "--report", "-").out)["loss"] == [1.0]


@pytest.mark.parametrize("name", ["compare", "solve", "doctor"])
def test_a_file_that_cannot_be_written_is_refused_first(
    meshwright, folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(folder)
    outcome = meshwright(name, *CASES[name][0], "--json", "absent/result.json")
    assert outcome.code == 2
    assert "--json: the folder 'absent' does not exist; create it first" in outcome.err
