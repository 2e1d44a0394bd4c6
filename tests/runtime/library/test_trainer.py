"""``Trainer`` and the script of the guide, which is run as it stands there."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.processes.library_runs import ADAMW, batches, full_tensors, scheduler_of
from support.steps.planned_steps import random_plan, real_step, traced_step
from torch.utils.data import DataLoader, Dataset, SubsetRandomSampler, TensorDataset

import runtime
from planner.graph.operator_graph import ValueRole
from planner.machine.cluster import load_cluster
from planner.plan.document import Plan, schedule_of
from runtime.library.data import TrainingData
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


class Noisy:
    """Batches with noise from all generators of the process."""

    def __iter__(self):
        for batch in batches("mlp", 3):
            noise = random.random() + np.random.rand() + torch.rand(())  # noqa: NPY002
            yield {name: tensor + noise for name, tensor in batch.items()}


class NoisyRows(Dataset):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, row: int) -> torch.Tensor:
        return torch.full((16,), float(row)) + random.random() + np.random.rand() + torch.rand(())  # noqa: NPY002


def noisy_on_rank(plan: Plan, folder: Path, steps: int, kind: str) -> list[float]:
    """Losses of a training that goes on from the folder's last checkpoint, or begins with seeded generators."""
    random.seed(0)
    np.random.seed(1)  # noqa: NPY002
    torch.manual_seed(2)
    step = runtime.load(plan, real_step("mlp").module, optimizer=ADAMW, device="cpu")
    data = Noisy() if kind == "batches" else DataLoader(NoisyRows(), batch_size=4, shuffle=True)
    runtime.Trainer(
        step, data, steps=steps, checkpoints=folder, every=2, metrics=folder / "metrics.jsonl", progress=False
    ).fit()
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("kind", ["batches", "rows"])
def test_noise_goes_on_where_the_checkpoint_was_written(kind, two_ranks, tmp_path):
    plan = random_plan("mlp", (2,), 0)
    (whole, *_) = two_ranks.run(noisy_on_rank, plan, tmp_path / "whole", 8, kind)
    two_ranks.run(noisy_on_rank, plan, tmp_path / "parts", 4, kind)
    (parts, *_) = two_ranks.run(noisy_on_rank, plan, tmp_path / "parts", 8, kind)
    assert parts == whole
    assert len(set(whole)) == 8


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


def passes_on_rank(plan: Plan, kind: str) -> list[list[list[int]]]:
    """Rows that this rank gets of the batches of two passes, and of the second one from its second batch on."""
    step = runtime.load(plan, real_step("mlp").module, optimizer=ADAMW, device="cpu")
    torch.manual_seed(torch.distributed.get_rank())
    rows = TensorDataset(torch.arange(30.0)[:, None].expand(30, 16).contiguous())
    loaders = {
        "shuffled": lambda: DataLoader(rows, batch_size=4, shuffle=True),
        "in order": lambda: DataLoader(rows, batch_size=4),
        "subset": lambda: DataLoader(rows, batch_size=4, drop_last=True, sampler=SubsetRandomSampler(range(2, 30))),
    }
    data = TrainingData(step, loaders[kind]())
    again = TrainingData(step, loaders[kind]())
    return [
        [step.shares.blocks(batch)["input"][:, 0].int().tolist() for batch in found]
        for found in (data.batches(0, 0), data.batches(1, 0), again.batches(1, 1))
    ]


@pytest.mark.parametrize("kind", ["shuffled", "in order", "subset"])
def test_ranks_read_the_same_batches_of_a_plain_loader(kind, two_ranks):
    plan = next(plan for seed in range(20) if has_cut_rows(plan := random_plan("mlp", (2,), seed)))
    (first, second, rest), (other, *_) = two_ranks.run(passes_on_rank, plan, kind)
    assert rest == second[1:]
    assert (first == second) == (kind == "in order")
    together = [sorted(one + two) for one, two in zip(first, other, strict=True)]
    assert len(together) == 7
    assert all(len(set(batch)) == 4 for batch in together)
    assert len({row for batch in together for row in batch}) == 28
    if kind == "in order":
        assert together[0] == [0, 1, 2, 3]


def has_cut_rows(plan: Plan) -> bool:
    """Whether each of two ranks reads half of the rows."""
    schedule = schedule_of(plan, traced_step("mlp").graph)
    placements = [
        schedule.buffers[buffer].placement
        for value, buffer in zip(traced_step("mlp").graph.inputs, schedule.inputs, strict=True)
        if traced_step("mlp").graph.values[value].role is ValueRole.INPUT
    ]
    return placements == [("S0",)]


def refused_on_rank(plan: Plan) -> list[str]:
    step = runtime.load(plan, real_step("mlp").module, optimizer=ADAMW, device="cpu")
    torch.manual_seed(torch.distributed.get_rank())
    rows = TensorDataset(torch.randn(8, 16))
    messages = []
    for data in (DataLoader(rows, batch_size=2), [torch.randn(4, 16)]):
        try:
            runtime.Trainer(step, data, steps=1, progress=False).fit()
        except BatchError as error:
            messages.append(str(error))
    return messages


def test_batches_that_differ_between_ranks_are_refused(two_ranks):
    for size, content in two_ranks.run(refused_on_rank, random_plan("mlp", (2,), 0)):
        assert size.startswith("the loader makes batches of 2 rows, the plan's have 4: give batch_size=4")
        assert content.startswith("the ranks read different global batches in pass 1 of the data: give the same ones")


def incomplete_on_rank(plan: Plan) -> list[str]:
    step = runtime.load(plan, real_step("mlp").module, optimizer=ADAMW, device="cpu")
    rows = TensorDataset(torch.randn(10, 16))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for drops in (False, True):
            data = DataLoader(rows, batch_size=4, drop_last=drops)
            runtime.Trainer(step, data, steps=3, progress=False).fit()
    return [str(entry.message) for entry in caught if "each pass" in str(entry.message)]


def test_rows_that_do_not_fill_a_batch_are_left_out_with_a_warning(two_ranks):
    first, second = two_ranks.run(incomplete_on_rank, random_plan("mlp", (2,), 0))
    assert len(first) == 1
    assert first[0].startswith("each pass leaves 2 of 10 rows out: they do not fill a batch of 4")
    assert second == []


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
        return [json.loads(line) for line in Path("log.jsonl").read_text().splitlines()]

    lines, weights = train(), load_file("trained.safetensors")
    assert lines[-1]["step"] == 60
    assert lines[-1]["loss"] < 0.7 * lines[0]["loss"]
    pictures.network().load_state_dict(weights)
    for late in ("step-00000040", "step-00000060"):
        shutil.rmtree(Path("saved", late))
    again, resumed = train(), load_file("trained.safetensors")
    assert [line["loss"] for line in again] == [line["loss"] for line in lines]
    assert all(torch.equal(resumed[key], tensor) for key, tensor in weights.items())
