"""Whole runs of plan files in fresh processes, and what users see when one cannot run."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.steps.planned_steps import random_plan, with_source
from support.tiers import slow

from planner.api import explain
from planner.common.model_error import ModelError
from planner.plan.decision import decision_digest
from planner.plan.document import load_plan, save_plan
from runtime.commands import main as cli
from runtime.job import launch
from runtime.job.launch import run_plan
from runtime.job.process_group import LaunchError
from runtime.measure.run_report import RunReport

ROOT = Path(__file__).parents[3]
ENVIRONMENT = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}", "OMP_NUM_THREADS": "1"}


def read_report(path):
    return RunReport.model_validate_json(path.read_text())


def torchrun(ranks, *arguments, module="runtime.rank_main"):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), "-m", module]
    return subprocess.run(
        [*command, *map(str, arguments)], capture_output=True, text=True, timeout=180, check=False, env=ENVIRONMENT
    )


@pytest.mark.cold_python
def test_a_run_is_what_was_predicted_and_equal_to_one_process():
    plan = random_plan("res_net", (2, 1), 0, "sgd")
    report = run_plan(plan, steps=3, check=True, profile=True)
    assert report.plan_digest == plan.digest
    assert report.measured_peak_bytes == report.predicted_peak_bytes == [plan.peak_bytes] * 2
    assert report.failures() == []
    assert report.loss == pytest.approx(report.reference_loss, rel=1e-5)
    assert report.max_grad_rel_error <= 1e-5
    assert report.max_param_rel_error <= 1e-4
    assert report.loss[2] < report.loss[0]
    assert report.measured_step_s > 0
    instructions = len(plan.decision.schedule.instructions)
    assert [len(times) for times in report.instruction_ns] == [instructions] * 2
    for times in report.instruction_ns:
        assert 0.3 * report.measured_step_s < sum(times) * 1e-9 < 1.5 * report.measured_step_s
    assert all(100e6 < resident < 4e9 for resident in report.resident_set_bytes)


@pytest.mark.parametrize("name", ["gpt2", slow("res_net"), slow("tied_gpt")])
def test_a_run_without_a_check_begins_with_the_same_state_though_no_process_holds_it_all(name):
    plan = random_plan(name, (2,), 0)
    plain, checked = run_plan(plan, steps=2), run_plan(plan, steps=2, check=True)
    assert plain.loss == checked.loss
    assert plain.measured_peak_bytes == checked.measured_peak_bytes
    assert checked.failures() == []


@pytest.mark.cold_python
@pytest.mark.slow
def test_training_on_a_text_started_by_torchrun(tmp_path):
    """The scratch folder keeps what is in it."""
    text, path, out = tmp_path / "text.txt", tmp_path / "plan.json", tmp_path / "report.json"
    scratch = tmp_path / "home"
    scratch.mkdir()
    (scratch / "thesis.tex").write_text("years of work")
    text.write_text("it was the best of times, it was the worst of times; " * 40)
    save_plan(random_plan("gpt2", (2,), 1), path)
    ended = torchrun(2, path, "--steps", 6, "--check", "--data", text, "--report", out, "--scratch", scratch)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert re.search(
        r"^step .+ predicted, .+ measured; peak .+ predicted, .+ measured; loss .+ to .+$", ended.stdout, re.M
    )
    assert [path.name for path in scratch.iterdir()] == ["thesis.tex"]
    report = read_report(out)
    assert report.plan_digest == load_plan(path).digest
    assert report.failures() == []
    assert len(set(report.loss)) == 6
    assert report.loss[-1] < report.loss[0]
    assert report.loss == pytest.approx(report.reference_loss, rel=1e-4)
    assert json.loads(out.read_text())["reference_loss"] is not None


def alone(*arguments, **environment):
    """One rank, as a launcher of one process starts it where the environment says so."""
    clean = {key: value for key, value in ENVIRONMENT.items() if key != "RANK"}
    command = [sys.executable, "-m", "runtime.rank_main", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**clean, **environment})


def job_of_one():
    """Environment of a job of one process."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    return {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": port}


def test_a_wrong_number_of_ranks_is_refused(tmp_path):
    save_plan(random_plan("mlp", (2,), 0), tmp_path / "plan.json")
    ended = alone(tmp_path / "plan.json", **job_of_one())
    assert ended.returncode != 0
    assert "the plan is for mesh 2, 2 ranks, the job has 1: start 2" in ended.stderr


@pytest.mark.slow
def test_without_a_launcher_the_message_says_how_to_start(tmp_path):
    save_plan(random_plan("mlp", (2,), 0), tmp_path / "plan.json")
    ended = alone(tmp_path / "plan.json")
    assert ended.returncode != 0
    assert "no launcher: start with `torchrun" in ended.stderr


NOT_COMPARED = r"--check: the step draws random numbers \(aten.native_dropout.default\), .*--dropout 0"


def test_a_step_that_draws_random_numbers_is_not_compared_and_no_rank_is_started(tmp_path, monkeypatch, meshwright):
    monkeypatch.setattr(launch, "run_module", lambda *_, **__: pytest.fail("ranks are started"))
    plan, path = random_plan("dropout_gpt", (2,), 0), tmp_path / "plan.json"
    save_plan(plan, path)
    assert load_plan(path) == plan
    ended = meshwright("run", path, "--steps", 1, "--device", "cpu", "--check", "--allow-code")
    assert ended.code == 2
    assert re.search(NOT_COMPARED, " ".join(ended.err.split()))
    assert "random_targets" not in random_plan("mlp", (2,), 0).decision.model_dump(), "digests of other plans stay"


@pytest.mark.slow
def test_ranks_refuse_to_compare_it_where_an_older_plan_does_not_say_that_it_is_random():
    plan = random_plan("dropout_gpt", (2,), 0)
    decision = plan.decision.model_copy(update={"random_targets": ()})
    older = plan.model_copy(update={"decision": decision, "digest": decision_digest(decision)})
    with pytest.raises(LaunchError, match=NOT_COMPARED):
        run_plan(older, steps=1, check=True)


@pytest.mark.slow
def test_a_plan_of_another_graph_is_refused_and_interrupts_are_the_callers_again():
    plan = with_source(random_plan("mlp", (2,), 0), graph_fingerprint="1" * 64)
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(
        LaunchError,
        match=r"the plan was made for something else: .+ \(graph is [0-9a-f]{12}, the plan has 1{12}\): plan again",
    ):
        run_plan(plan, steps=1)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize(
    ("source", "message"),
    [
        slow(
            "support.steps.failing_models:raises_on_rank_one", r"rank 1 of 2 failed.*the disk of this rank is on fire"
        ),
        slow("support.steps.failing_models:killed_on_rank_one", r"rank 1 of 2 failed.*Signal 9 \(SIGKILL\)"),
    ],
)
def test_a_rank_that_fails_ends_the_run_with_one_error(source, message):
    plan = with_source(random_plan("mlp", (2,), 0), source=source)
    started = time.monotonic()
    with pytest.raises(LaunchError, match=message) as caught:
        run_plan(plan, steps=1, allow_code=True)
    assert time.monotonic() - started < 60
    assert "extraInfo" not in str(caught.value)
    assert "Traceback" not in str(caught.value)


@pytest.mark.slow
def test_a_check_that_fails_is_shown_once_and_ends_every_rank_with_an_error(tmp_path):
    plan = with_source(random_plan("mlp", (2,), 0), source="support.steps.failing_models:doubled_outside_of_the_plan")
    save_plan(plan, tmp_path / "plan.json")
    out = tmp_path / "report.json"
    ended = torchrun(
        2, "run", tmp_path / "plan.json", "--steps", 1, "--check", "--report", out, "--allow-code",
        module="runtime.commands.main",
    )  # fmt: skip
    assert ended.returncode == 1
    assert ended.stdout.count("peak of rank 0") == ended.stdout.count("gradients, worst tensor") == 1
    assert ended.stderr.count("meshwright: loss of the first step") == 1
    assert ended.stderr.count("exitcode  : 1 ") + ended.stderr.count("exitcode  : -15 ") == 2
    assert [failure.partition(" ")[0] for failure in read_report(out).failures()] == ["loss", "gradient"]


@pytest.mark.slow
def test_ranks_refuse_a_plan_whose_model_is_code(tmp_path):
    save_plan(with_source(random_plan("mlp", (1,), 0), source="nobody_named:this"), tmp_path / "plan.json")
    ended = alone(tmp_path / "plan.json", "--steps", 1, **job_of_one())
    assert ended.returncode != 0
    assert "'nobody_named:this' is a function" in ended.stderr
    assert "--allow-code" in ended.stderr


def test_a_plan_from_elsewhere_runs_no_code(tmp_path):
    plan = with_source(random_plan("mlp", (2,), 0), source="nobody_named:this")
    with pytest.raises(ModelError, match=r"'nobody_named:this' is a function.*--allow-code"):
        run_plan(plan, steps=1)
    with pytest.raises(ModelError, match="'nobody_named:this' is a function"):
        explain(plan)
    save_plan(plan, tmp_path / "plan.json")
    for command in ("run", "explain", "validate"):
        with pytest.raises(ModelError, match="allow-code"):
            cli.app([command, str(tmp_path / "plan.json")], standalone_mode=False)


def test_input_that_cannot_be_run_is_refused_before_anything_starts(tmp_path):
    plan = random_plan("mlp", (2,), 0)
    with pytest.raises(LaunchError, match="steps 0"):
        run_plan(plan, steps=0)
    with pytest.raises(LaunchError, match=r"missing\.txt is no file"):
        run_plan(plan, data=tmp_path / "missing.txt")
    with pytest.raises(ValueError, match=r"plan .*none\.json cannot be read"):
        run_plan(tmp_path / "none.json")
