"""The check of a device, on the CPU: what it finds, what it writes, and that it can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from planner.benchmarks.device_plans import CASES, SHARES, SUFFIX
from runtime.gpu_check import __main__, kernels, layers, plans, steps
from runtime.gpu_check.outcomes import FailedError, NotRunError, Status, outcome_of
from runtime.job.device_memory import DeviceMemoryError
from runtime.library.process import join

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[3]


def run(out: Path, *only: str) -> dict[str, dict]:
    command = [sys.executable, "-m", "runtime.gpu_check", "--device", "cpu", "--out", str(out), "--only", *only]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False, env=environment)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return {outcome["name"]: outcome for outcome in json.loads(out.read_text())["outcomes"]}


@pytest.mark.slow
def test_it_passes_on_a_cpu_and_names_what_it_cannot_run(tmp_path):
    found = run(
        tmp_path / "out.json", "conv", "offload", "library", "time by class, g", "under limits, l", "mem", "copies"
    )
    assert {outcome["status"] for outcome in found.values()} == {"passed", "not_run"}
    assert found["copies beside the computation"]["reason"] == "needs a CUDA device"
    assert found["under limits, llama-1b"]["reason"] == "needs a CUDA device"
    assert found["offload"]["figures"]["host_peak_bytes"] > 0
    assert found["library"]["figures"]["different"] == []
    figures = found["under limits, llama-tiny"]["figures"]
    for entry in figures["plans"].values():
        assert "not_run" in entry or entry["peak_bytes"] == entry["predicted_peak_bytes"] <= entry["limit_bytes"]
    kept = [run["peak_bytes"] for run in figures["checkpointed_blocks"].values()]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] < figures["plain"]["peak_bytes"]
    timed = found["time by class, gpt2-tiny"]["figures"]
    assert sum(timed["instruction_ns"]) == pytest.approx(timed["kernel_seconds"] * 1e9)


@pytest.mark.fuzz
def test_compiled_steps_are_compared_at_one_peak(tmp_path):
    figures = run(tmp_path / "out.json", "compiled, gpt2-tiny")["compiled, gpt2-tiny"]["figures"]
    theirs, ours = (figures["budgets"]["0.5"][name] for name in ("torch", "meshwright"))
    assert theirs["peak_bytes"] < figures["plain"]["peak_bytes"]
    assert ours["limit_bytes"] == theirs["peak_bytes"]
    for found in (theirs, ours):
        assert found["losses"] == pytest.approx(figures["plain"]["losses"], rel=1e-5)


@pytest.mark.fuzz
def test_plans_of_layers_train_as_the_plain_module():
    join(CPU)
    chosen = ("both", "parameters on the host")
    found = layers.plans_of_layers(CPU, 2, 32, 1, {name: layers.SETTINGS[name] for name in chosen})
    assert {*found} == {"plain", *chosen}
    assert all(found[name]["host_peak_bytes"] > 0 for name in chosen)
    assert found["both"]["updated_loss_error"] < 1e-5


def test_the_report_is_kept_when_a_check_ends_the_process(tmp_path, monkeypatch):
    def leave():
        raise SystemExit

    two = [("first", dict), ("second", leave), ("third", dict)]
    monkeypatch.setattr(__main__, "checks", lambda device: iter(two))
    with pytest.raises(SystemExit):
        __main__.run_checks(CPU, tmp_path / "out.json")
    kept = json.loads((tmp_path / "out.json").read_text())["outcomes"]
    assert [(outcome["name"], outcome["status"]) for outcome in kept] == [("first", "passed")]


@pytest.mark.slow
def test_it_writes_one_file(tmp_path):
    found = run(tmp_path / "out.json", "dropout")
    assert found["dropout"]["figures"]["different"] == 0
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def failing(error: Exception):
    def check():
        raise error

    return check


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (NotRunError("needs two"), Status.NOT_RUN, "needs two"),
        (FailedError("wrong", {"error": 1.0}), Status.FAILED, "wrong"),
        (DeviceMemoryError("too large"), Status.NOT_RUN, "too large"),
        (torch.OutOfMemoryError("no more"), Status.NOT_RUN, "no more"),
        (ZeroDivisionError("by zero"), Status.FAILED, "ZeroDivisionError: by zero"),
    ],
)
def test_what_a_check_raises_is_its_outcome(error, status, reason):
    found = outcome_of("it", failing(error))
    assert (found.status, found.reason) == (status, reason)
    assert found.figures == getattr(error, "figures", {})


def test_wrong_attention_fails(monkeypatch):
    sizes = 1, 2, 8, 8
    assert kernels.attention(CPU, sizes)["float32, mask"]["error"] == 0.0
    built = kernels._local

    def flipped(target, *rest):
        function, kernel = built(target, *rest)
        if "backward" not in str(target):
            return function, kernel
        return (lambda *tensors: tuple(-tensor for tensor in function(*tensors))), kernel

    monkeypatch.setattr(kernels, "_local", flipped)
    with pytest.raises(FailedError, match="float32, causal"):
        kernels.attention(CPU, sizes)


def test_a_plan_above_its_limit_fails():
    subject = type("Subject", (), {"reference": CASES["gpt2-tiny"].reference})
    limit = 10
    found = {"peak_bytes": limit + steps.SCRATCH, "losses": [1.0]}
    assert steps._wrong("it", found, {"losses": [1.0]}, limit, subject) == []
    (wrong,) = steps._wrong("it", found, {"losses": [1.0]}, limit - 1, subject)
    assert wrong == f"it needed {found['peak_bytes']} bytes, its limit is {limit - 1}"
    assert "differs from the plain" in steps._wrong("it", found, {"losses": [1.1]}, limit, subject)[0]


def test_the_plans_that_travel_are_those_of_the_command():
    assert plans.SHARES == SHARES
    for name in ("gpt2-tiny", "llama-tiny", "gpt2-half", "gpt2-half-2", "gpt2-offload", "u-net", "gpt2-wide"):
        for share in CASES[name].shares:
            found = plans.device_plan(name, share)
            assert (found.plan is None) == bool(found.refused)
            assert found.plan is None or found.plan.peak_bytes <= found.limit_bytes
            assert found.plan is None or sum(found.predicted_ns.values()) == found.plan.decision.predicted.objective_ns
    known = {f"{name}-{share}{SUFFIX}" for name, case in CASES.items() for share in case.shares}
    assert {path.name for path in plans.FOLDER.iterdir()} <= known
    with pytest.raises(NotRunError, match=r"gpt2-tiny-55\.json\.xz is not among the plans"):
        plans.device_plan("gpt2-tiny", 55)
