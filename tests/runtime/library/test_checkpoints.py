"""Checkpoints: bit-equal under the same plan, equal within rounding under another, complete or not there."""

from __future__ import annotations

import fcntl
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from support.processes.library_runs import ADAMW, OPTIMIZERS, batches, full_tensors, scheduler_of
from support.steps.planned_steps import random_plan, real_step
from support.tiers import fuzz, slow
from torch import Tensor

import runtime
from planner.plan.document import Plan
from runtime.job.watchdog import WatchedThread
from runtime.library.checkpoint import latest_checkpoint
from runtime.library.errors import CheckpointError
from runtime.library.writing import LOCK_FILE, lock_folder


def trained_on_rank(
    plan: Plan, name: str, optimizer: str, begin: int, end: int, folder: Path | None, keep: int | None = None
) -> tuple[list[float], dict[str, Tensor], dict[str, Any]]:
    """Losses of steps ``begin`` to ``end``, all tensors, the position; from and to the checkpoints in a folder."""
    module = real_step(name).module
    step = runtime.load(plan, module, optimizer=OPTIMIZERS[optimizer], clip_norm=0.5, device="cpu")
    scheduler = scheduler_of(step.optimizer)
    position = step.resume(folder, scheduler) if begin and folder else {}
    assert step.steps == begin
    losses = []
    for batch in batches(name, end)[begin:]:
        losses.append(step(batch).item())
        scheduler.step()
        if folder is not None and not begin:
            step.save(folder, scheduler, {"epoch": 3, "batch": step.steps}, keep)
    return losses, full_tensors(step.state_dict()), position


@pytest.mark.parametrize(
    ("name", "optimizer"),
    [slow("dropout_gpt", "adamw"), slow("res_net", "nesterov"), fuzz("llama", "fused"), fuzz("tied_gpt", "foreach")],
)
def test_the_same_plan_goes_on_bit_equal(name, optimizer, two_ranks, tmp_path):
    plan = random_plan(name, (2,), 0)
    whole = two_ranks.run(trained_on_rank, plan, name, optimizer, 0, 4, None)
    two_ranks.run(trained_on_rank, plan, name, optimizer, 0, 2, tmp_path)
    rest = two_ranks.run(trained_on_rank, plan, name, optimizer, 2, 4, tmp_path)
    for (losses, tensors, _), (later, found, position) in zip(whole, rest, strict=True):
        assert later == losses[2:]
        assert all(torch.equal(found[key], tensor) for key, tensor in tensors.items())
        assert position == {"epoch": 3, "batch": 2}


@pytest.mark.parametrize("name", [slow("gpt2"), slow("conv_net")])
def test_another_mesh_and_plan_go_on_within_rounding(name, two_ranks, four_ranks, tmp_path):
    plan, other = random_plan(name, (2,), 0), random_plan(name, (2, 2), 5)
    (whole, *_) = two_ranks.run(trained_on_rank, plan, name, "adamw", 0, 4, None)
    two_ranks.run(trained_on_rank, plan, name, "adamw", 0, 2, tmp_path)
    for losses, found, _ in four_ranks.run(trained_on_rank, other, name, "adamw", 2, 4, tmp_path):
        assert losses == pytest.approx(whole[0][2:], rel=1e-5)
        assert all(torch.allclose(found[key], tensor, rtol=1e-4, atol=1e-5) for key, tensor in whole[1].items())


def test_the_last_few_are_kept_and_remains_removed(two_ranks, tmp_path):
    (tmp_path / ".writing-step-00000001-left").mkdir()
    two_ranks.run(trained_on_rank, random_plan("mlp", (2,), 0), "mlp", "adamw", 0, 4, tmp_path, 2)
    assert sorted(path.name for path in tmp_path.glob("*step*")) == ["step-00000003", "step-00000004"]
    files = sorted(path.name for path in (tmp_path / "step-00000004").iterdir())
    assert files[0] == "loop.pt"
    assert all(name.endswith(".safetensors") for name in files[1:])


def resumed_at_the_end_on_rank(plan: Plan, folder: Path) -> int:
    """A training that has nothing left to do, in a folder where an older checkpoint was being removed."""
    module = real_step("mlp").module
    step = runtime.load(plan, module, optimizer=OPTIMIZERS["adamw"], clip_norm=0.5, device="cpu")
    if torch.distributed.get_rank() == 0:
        (folder / ".removed-step-00000001").mkdir()
    lock_folder(folder)
    step.resume(folder, scheduler_of(step.optimizer))
    return step.steps


def test_remains_are_removed_where_nothing_is_left_to_do(two_ranks, tmp_path):
    plan = random_plan("mlp", (2,), 0)
    two_ranks.run(trained_on_rank, plan, "mlp", "adamw", 0, 2, tmp_path, 1)
    two_ranks.close()  # the job that wrote ends
    assert two_ranks.run(resumed_at_the_end_on_rank, plan, tmp_path) == [2, 2]
    assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK_FILE, "step-00000002"]


def locked_on_rank(plan: Plan, folder: Path) -> list[str]:
    """What a save and a trainer say of a folder into which another process writes."""
    step = runtime.load(plan, real_step("mlp").module, optimizer=ADAMW, device="cpu")
    messages = []
    for write in (
        lambda: step.save(folder),
        lambda: runtime.Trainer(step, batches("mlp", 1), steps=1, checkpoints=folder).fit(),
    ):
        try:
            write()
        except CheckpointError as error:
            messages.append(str(error))
    return [*messages, str(step.steps)]


def test_two_jobs_do_not_write_into_one_folder(two_ranks, tmp_path):
    with (tmp_path / LOCK_FILE).open("w") as file:
        file.write("process 1 on elsewhere")
        file.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        for *messages, steps in two_ranks.run(locked_on_rank, random_plan("mlp", (2,), 0), tmp_path):
            assert len(messages) == 2
            assert all("process 1 on elsewhere writes into this folder: give this job" in entry for entry in messages)
            assert steps == "0"
    assert [path.name for path in tmp_path.iterdir()] == [LOCK_FILE]


def interrupted_on_rank(plan: Plan, folder: Path) -> tuple[str, str]:
    """What a save says that fails behind the tensors, and the latest checkpoint after it."""
    step = runtime.load(plan, real_step("mlp").module, optimizer=ADAMW, device="cpu")
    step.save(folder)
    step(batches("mlp", 1)[0])
    message = ""
    with patch("runtime.library.checkpoint._write_synced", side_effect=OSError(28, "No space left on device")):
        try:
            step.save(folder, wait=False)
            step(batches("mlp", 1)[0])
            step.wait_for_save()
        except CheckpointError as error:
            message = str(error)
    return message, str(latest_checkpoint(folder))


def test_a_save_that_fails_leaves_the_older_checkpoint(two_ranks, tmp_path):
    for message, latest in two_ranks.run(interrupted_on_rank, random_plan("mlp", (2,), 0), tmp_path):
        assert "step-00000001 cannot be written: " in message
        assert "No space left" in message
        assert latest == str(tmp_path / "step-00000000")


def watched_writes_on_rank(plan: Plan, folder: Path) -> list[tuple[str, bool]]:
    """What happens to the thread that a save writes from, and whether that is not the main thread."""
    seen = []

    def note(event: str):
        return lambda _: seen.append((event, threading.current_thread() is not threading.main_thread()))

    step = runtime.load(plan, real_step("mlp").module, optimizer=ADAMW, device="cpu")
    with patch.object(WatchedThread, "begin", note("begin")), patch.object(WatchedThread, "end", note("end")):
        step.save(folder, wait=False)
        step.wait_for_save()
        deadline = time.monotonic() + 10
        while len(seen) < 2 and time.monotonic() < deadline:  # the end follows after the result
            time.sleep(0.01)
        step.save(folder)
    return seen


def test_the_thread_that_writes_beside_the_steps_is_watched(two_ranks, tmp_path):
    for seen in two_ranks.run(watched_writes_on_rank, random_plan("mlp", (2,), 0), tmp_path):
        assert seen == [("begin", True), ("end", True)]


def refusals_on_rank(plan: Plan, other: Plan, folder: Path) -> list[str]:
    """Messages of loads that do not fit what was saved."""
    step = runtime.load(plan, real_step("mlp").module, optimizer=ADAMW, device="cpu")
    step(batches("mlp", 1)[0])
    path = step.save(folder, scheduler_of(step.optimizer))
    sgd = runtime.load(plan, real_step("mlp").module, optimizer=torch.optim.SGD, device="cpu")
    net = runtime.load(other, real_step("conv_net").module, optimizer=ADAMW, device="cpu")
    grouped = runtime.load(plan, real_step("mlp").module, optimizer=in_two_groups, device="cpu")
    lambdas = torch.optim.lr_scheduler.LambdaLR(step.optimizer, Rate())
    messages = []
    for load in (
        lambda: sgd.resume(path),
        lambda: step.resume(path),
        lambda: grouped.resume(folder, scheduler_of(grouped.optimizer)),
        lambda: net.resume(path, scheduler_of(net.optimizer)),
        lambda: step.resume(folder / "nothing"),
        lambda: step.save(folder, lambdas),
    ):
        try:
            load()
            messages.append("")
        except CheckpointError as error:
            messages.append(str(error))
    return messages


class Rate:
    """A rate of one's own, whose state would be code."""

    def __init__(self) -> None:
        self.me = Rate

    def __call__(self, step: int) -> float:
        return 1.0


def in_two_groups(named):
    return torch.optim.AdamW([{"params": named[:1]}, {"params": named[1:], "lr": 1e-3}])


def test_what_does_not_fit_is_refused_by_name(two_ranks, tmp_path):
    plan, other = random_plan("mlp", (2,), 0), random_plan("conv_net", (2,), 0)
    for found in two_ranks.run(refusals_on_rank, plan, other, tmp_path):
        optimizer, scheduler, groups, model, nothing, code = found
        assert "is of AdamW, the step has SGD: use the same class" in optimizer
        assert "has a scheduler's state, none was given" in scheduler
        assert "has its parameters in 1 groups of the optimizer, the step has others in 2" in groups
        assert "groups of the optimizer" in model
        assert "neither a checkpoint nor a folder that holds one" in nothing
        assert "holds more than plain values" in code
