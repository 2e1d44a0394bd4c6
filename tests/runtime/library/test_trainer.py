"""``Trainer`` and the script of the guide, which is run as it stands there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.processes.library_runs import ADAMW, batches, full_tensors, scheduler_of
from support.steps.planned_steps import random_plan, real_step

import runtime
from planner.machine.cluster import load_cluster
from planner.plan.document import Plan
from runtime.library.errors import BatchError

ROOT = Path(__file__).parents[3]
GUIDE = ROOT / "runtime" / "library" / "README.md"


def fit_on_rank(plan: Plan, folder: Path, steps: int, every: int = 0) -> tuple[float, dict[str, torch.Tensor], float]:
    """Loss of the last step, all tensors, and the rate of the next step."""
    step = runtime.load(plan, real_step("mlp").module, optimizer=ADAMW, clip_norm=1.0, device="cpu")
    scheduler = scheduler_of(step.optimizer)
    data = batches("mlp", 3)
    trainer = runtime.Trainer(
        step,
        data,
        steps=steps,
        scheduler=scheduler,
        checkpoints=folder / "checkpoints",
        every=every,
        metrics=folder / "metrics.jsonl",
        evaluation=data[:2],
        evaluate_every=3,
        beside=every > 0,
        profile={3},
        traces=folder / "traces",
    )
    loss = trainer.fit()
    return loss, full_tensors(step.state_dict()), step.optimizer.param_groups[0]["lr"]


def test_metrics_evaluation_and_resume_in_the_middle_of_a_pass(two_ranks, tmp_path):
    plan = random_plan("mlp", (2,), 0)
    whole = two_ranks.run(fit_on_rank, plan, tmp_path / "whole", 8)
    two_ranks.run(fit_on_rank, plan, tmp_path / "parts", 5, 2)
    shutil.rmtree(tmp_path / "parts" / "checkpoints" / "step-00000005")  # as if the job had ended in step 5
    parts = two_ranks.run(fit_on_rank, plan, tmp_path / "parts", 8)
    for (loss, tensors, rate), (later, found, rate_later) in zip(whole, parts, strict=True):
        assert (later, rate_later) == (loss, rate)
        assert all(torch.equal(found[key], tensor) for key, tensor in tensors.items())
    lines = [
        [json.loads(line) for line in (tmp_path / run / "metrics.jsonl").read_text().splitlines()]
        for run in ("whole", "parts")
    ]
    for line in (entry for run in lines for entry in run):
        line.pop("seconds", None)
    assert lines[0] == lines[1]
    steps = [line for line in lines[0] if "loss" in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [line["epoch"] for line in steps] == [0, 0, 0, 1, 1, 1, 2, 2]
    assert [line["step"] for line in lines[0] if "evaluation_loss" in line] == [3, 6]
    assert steps[0]["lr"] != steps[1]["lr"]
    assert steps[-1]["loss"] < steps[0]["loss"]
    assert all(line["gradient_norm"] > 0 for line in steps)
    traces = sorted((tmp_path / "whole" / "traces").iterdir())
    assert [path.name for path in traces] == [f"step-00000003-rank-{rank}.json" for rank in (0, 1)]
    assert any("aten::" in event.get("name", "") for event in json.loads(traces[0].read_text())["traceEvents"])


def orders_on_rank(plan: Plan) -> list[list[list[int]]]:
    """Rows of two passes, and of the second one from its second batch on."""
    step = runtime.load(plan, real_step("mlp").module, optimizer=ADAMW, device="cpu")
    sampler = runtime.ShareSampler(step, 30, seed=3)
    passes = [list(sampler), list(sampler)]
    sampler.epoch, sampler.start = 1, 1
    return [*passes, list(sampler)]


def test_ranks_read_each_row_once(two_ranks, four_ranks):
    plan = random_plan("mlp", (2,), 0)
    found = two_ranks.run(orders_on_rank, plan)
    (first, second, rest), _ = found
    assert first != second
    assert rest == second[1:]
    assert len(first) == 30 // 4
    joined = [sorted({row for rank in found for row in rank[0][batch]}) for batch in range(7)]
    assert all(len(batch) == 4 for batch in joined)
    assert len({row for batch in joined for row in batch}) == 28
    other = four_ranks.run(orders_on_rank, random_plan("mlp", (2, 2), 1))
    assert [sorted({row for rank in other for row in rank[0][batch]}) for batch in range(7)] == joined


def exhausted_on_rank(plan: Plan) -> str:
    step = runtime.load(plan, real_step("mlp").module, optimizer=ADAMW, device="cpu")
    try:
        runtime.Trainer(step, iter(batches("mlp", 2)), steps=5, progress=False).fit()
    except BatchError as error:
        return str(error)
    return ""


def test_an_iterator_that_ends_is_refused(two_ranks):
    for message in two_ranks.run(exhausted_on_rank, random_plan("mlp", (2,), 0)):
        assert "the data has no batch after step 2: give an iterable that can be passed over again" in message


def guide_files() -> dict[str, str]:
    """Content of the files of the guide, by name."""
    blocks = re.findall(
        r"^```python\n# (\w+\.py)\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return dict(blocks)


def test_the_script_of_the_guide_is_short():
    assert len(guide_files()["train.py"].splitlines()) <= 25


@pytest.mark.slow
def test_the_script_of_the_guide_trains_and_resumes(tmp_path, meshwright, monkeypatch):
    for name, content in guide_files().items():
        (tmp_path / name).write_text(content)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    import pictures

    save_file(pictures.network().state_dict(), "pretrained.safetensors")
    command = re.search(r"`meshwright (plan pictures:step [^`]*)`", GUIDE.read_text())[1].split()
    cluster = load_cluster("a100-8-nvlink")
    processes = cluster.model_copy(update={"device": cluster.device.model_copy(update={"kind": "cpu"})})
    Path("processes.json").write_text(processes.model_dump_json())
    ended = meshwright(*command, "--cluster", "processes.json", "--time-limit", 10)
    assert ended.code == 0, ended.err
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, tmp_path))), "OMP_NUM_THREADS": "1"}

    def train() -> list[dict[str, float]]:
        launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "train.py"]
        ran = subprocess.run(launch, capture_output=True, text=True, timeout=250, check=False, env=environment)
        assert ran.returncode == 0, ran.stderr[-3000:]
        return [json.loads(line) for line in Path("metrics.jsonl").read_text().splitlines()]

    lines, weights = train(), load_file("trained.safetensors")
    assert lines[-1]["step"] == 60
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    pictures.network().load_state_dict(weights)
    for late in ("step-00000040", "step-00000060"):
        shutil.rmtree(Path("checkpoints", late))
    again, resumed = train(), load_file("trained.safetensors")
    assert [line["loss"] for line in again] == [line["loss"] for line in lines]
    assert all(torch.equal(resumed[key], tensor) for key, tensor in weights.items())
