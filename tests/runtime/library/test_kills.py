"""Jobs whose ranks are killed at any moment: each goes on from a whole checkpoint, and ends with the same bits."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from support.processes.library_runs import ADAMW, batches, full_tensors, scheduler_of
from support.processes.rank_pool import RankPool
from support.steps.planned_steps import random_plan, real_step

import runtime
from runtime.job.process_group import LaunchError
from runtime.library.writing import LOCK_FILE

STEPS = 6
WRITING_SECONDS = 0.05
"""Longest wait between the begin of a checkpoint and a kill that is meant to meet it."""


def fit_on_rank(plan, folder: Path, beside: bool) -> dict[str, torch.Tensor]:
    """The model after a training that goes on from the folder's last checkpoint, and this rank's moments."""
    step = runtime.load(plan, real_step("mlp").module, optimizer=ADAMW, clip_norm=1.0, device="cpu")
    options = {"scheduler": scheduler_of(step.optimizer), "every": 1, "keep": 2, "beside": beside, "progress": False}
    runtime.Trainer(step, batches("mlp", 3), steps=STEPS, checkpoints=folder, **options).fit()
    return full_tensors({**step.state_dict(), **{f"moment.{k}": v for k, v in moments(step).items()}})


def moments(step) -> dict[str, torch.Tensor]:
    return {name: step.optimizer.state[p]["exp_avg"] for name, p in step.updates.parameters.items()}


def ready() -> int:
    return os.getpid()


class Killer(threading.Thread):
    """Kills one process at a moment that the random numbers choose: after a time, or while a checkpoint is written."""

    def __init__(self, pool: RankPool, folder: Path, chosen: random.Random, longest: float) -> None:
        super().__init__(daemon=True)
        self.pool, self.folder, self.over, self.killed = pool, folder, threading.Event(), False
        self.rank = chosen.randrange(pool.size)
        self.writing, self.wait = chosen.random() < 0.5, chosen.uniform(0, longest)
        self.count, self.delay = chosen.randrange(STEPS), chosen.uniform(0, WRITING_SECONDS)

    def run(self) -> None:
        seen, begun = set(), time.monotonic()
        while not self.over.is_set():
            if self.writing:
                seen.update(path.name for path in self.folder.glob(".writing-*"))
                if len(seen) > self.count:
                    time.sleep(self.delay)
                    return self.kill()
            elif time.monotonic() - begun > self.wait:
                return self.kill()
            time.sleep(1e-3)
        return None

    def kill(self) -> None:
        ranks = self.pool._ranks
        if ranks is not None and ranks._processes and not self.over.is_set():
            os.kill(ranks._processes[self.rank].pid, signal.SIGKILL)
            self.killed = True


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists() and "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def survive(seed: int, kills: int, folder: Path, pool: RankPool, expected) -> None:
    """Train until so many ranks have been killed, and once more to the end; trainings that ended begin anew."""
    chosen = random.Random(seed)
    plan, done, training, longest = random_plan("mlp", (2,), 0), 0, 0, 1.5
    while True:
        place = folder / f"{seed}-{training}"
        place.mkdir(exist_ok=True)
        pool.run(ready)  # the ranks are there, so a kill meets the training
        pids = [process.pid for process in pool._ranks._processes]
        killer = Killer(pool, place, chosen, longest)
        if done < kills:
            killer.start()
        begun, found, failure = time.monotonic(), None, ""
        try:
            found = pool.run(fit_on_rank, plan, place, bool(training % 2), timeout=100)
        except LaunchError as error:
            failure = str(error)
        killer.over.set()
        if killer.ident:
            killer.join()
        if found is None:
            assert killer.killed, failure
            assert f"rank {killer.rank} of 2 failed: its process died" in failure
            deadline = time.monotonic() + 5
            while any(map(is_alive, pids)) and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not any(map(is_alive, pids)), "a rank is left"
        elif killer.killed:  # it met a rank that had ended its work
            pool.close()
        done += killer.killed
        if found is not None:
            longest = max(0.05, 0.9 * (time.monotonic() - begun)) if not killer.killed else longest
            training += 1
            for tensors, whole in zip(found, expected, strict=True):
                assert tensors.keys() == whole.keys()
                assert all(torch.equal(tensors[name], tensor) for name, tensor in whole.items())
            assert [path.name for path in sorted(place.glob("step-*"))] == ["step-00000005", "step-00000006"]
            assert {path.name for path in place.glob(".*")} == {LOCK_FILE}
            if done >= kills:
                return


@pytest.fixture(scope="module")
def uninterrupted(two_ranks, tmp_path_factory):
    return two_ranks.run(fit_on_rank, random_plan("mlp", (2,), 0), tmp_path_factory.mktemp("whole"), False)


@pytest.fixture
def pool():
    ranks = RankPool(2)
    yield ranks
    ranks.close()


@pytest.mark.parametrize(
    ("seed", "kills"),
    [
        (0, 1),
        pytest.param(1, 10, marks=pytest.mark.slow),
        *(pytest.param(seed, 10, marks=pytest.mark.fuzz) for seed in range(2, 21)),
    ],
)
def test_killed_jobs_end_with_the_same_bits(seed, kills, pool, uninterrupted, tmp_path):
    survive(seed, kills, tmp_path, pool, uninterrupted)
