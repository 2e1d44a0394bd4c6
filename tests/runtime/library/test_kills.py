"""Jobs whose ranks are killed at any moment: each goes on from a whole checkpoint, and ends with the same bits."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.processes.library_runs import ADAMW, batches, full_tensors, scheduler_of
from support.processes.rank_pool import RankPool
from support.steps.planned_steps import random_plan, real_step

import runtime
from planner.plan.document import save_plan
from runtime.job.process_group import LaunchError
from runtime.library.writing import LOCK_FILE

ROOT = Path(__file__).parents[3]
STEPS = 6
SCRIPT = """
import os, signal, sys, time
from functools import partial
from pathlib import Path
import torch
import runtime
from runtime.library import export as exporting, writing
from support.processes.library_runs import ADAMW, batches
from support.steps.planned_steps import real_step

mode, plan, folder = sys.argv[1], sys.argv[2], Path(sys.argv[3])

class Data:
    def __iter__(self):
        for number, batch in enumerate(batches("mlp", 8)):
            if number == 3 and os.environ["RANK"] == "1" and mode[:5] != "write":
                (folder / "fault").touch()
                if mode == "raise":
                    raise ValueError("this row is bad")
                if mode == "hang":
                    time.sleep(1000)
                os.kill(os.getpid(), getattr(signal, mode, signal.SIGKILL))
            yield batch

class Asleep(torch.optim.AdamW):
    loaded = False  # loading tries the optimizer
    begun = set()

    def step(self, *arguments):
        is_next = self.loaded and mode == "sleep late" and step.steps not in self.begun
        if is_next:
            self.begun.add(step.steps)
        if is_next and len(self.begun) < 3:
            time.sleep(9)
        elif os.environ["RANK"] == "1" and self.loaded and (is_next or mode == "sleep"):
            (folder / "fault").touch()
            time.sleep(1000)
        return super().step(*arguments)

class Schedule(torch.optim.lr_scheduler.StepLR):
    def state_dict(self):
        if mode == "save" and os.environ["RANK"] == "1" and self.last_epoch == 3:
            (folder / "fault").touch()
            time.sleep(1000)
        return super().state_dict()

class Hanging(writing.SyncedFile):
    def write(self, content):
        rank = "0" if mode.startswith("export") else "1"
        is_met = mode[:5] == "write" and step.steps >= 3 or "trained" in str(self.name)
        if is_met and mode.startswith(("write", "export")) and os.environ["RANK"] == rank:
            (folder / "fault").touch()
            if mode.endswith("SIGSTOP"):
                os.kill(os.getpid(), signal.SIGSTOP)
            time.sleep(1000)
        return super().write(content)

writing.SyncedFile = exporting.SyncedFile = Hanging
optimizer = partial(Asleep, **ADAMW.keywords) if mode[:5] == "sleep" else ADAMW
step = runtime.load(plan, real_step("mlp").module, optimizer=optimizer, device="cpu")
Asleep.loaded = True
schedule = Schedule(step.optimizer, 100)
every = 0 if mode == "sleep late" else 1
saving = {"checkpoints": folder / "checkpoints", "every": every, "beside": "at once" not in mode}
runtime.Trainer(step, Data(), steps=3 if mode[:6] == "export" else 8, scheduler=schedule, **saving).fit()
step.export(folder / "trained.safetensors")
"""
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
        *(pytest.param(seed, 10, marks=pytest.mark.fuzz) for seed in range(2, 22)),
    ],
)
def test_killed_jobs_end_with_the_same_bits(seed, kills, pool, uninterrupted, tmp_path):
    survive(seed, kills, tmp_path, pool, uninterrupted)


def started_with(*parts: str) -> list[int]:
    """Processes in whose command line are all the parts."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            text = path.read_text()
            if all(part in text for part in parts) and is_alive(int(path.parent.name)):
                found.append(int(path.parent.name))
    return found


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


@pytest.mark.fuzz
@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("raise", "meshwright: rank 1 of 2 failed: ValueError: this row is bad"),
        ("hang", "meshwright: rank 1 of 2 hangs outside step 4"),
        ("sleep", "meshwright: rank 1 of 2 hangs in step 1: it has done nothing for"),
        ("sleep late", "meshwright: rank 1 of 2 hangs in step 3: it has done nothing for"),
        ("save", "meshwright: rank 1 of 2 hangs in checkpoint 3"),
        ("write", "meshwright: rank 1 of 2 hangs in write of checkpoint"),
        ("write at once", "meshwright: rank 1 of 2 hangs in write of checkpoint 3: it has done nothing for"),
        ("write at once SIGSTOP", "meshwright: rank 1 of 2 died or was stopped: no sign of life"),
        ("export", "meshwright: rank 0 of 2 hangs in export 1: it has done nothing for"),
        ("SIGSTOP", "meshwright: rank 1 of 2 died or was stopped: no sign of life"),
        ("SIGKILL", "Signal 9 (SIGKILL)"),
    ],
)
def test_a_fault_under_torchrun_ends_the_job_and_is_named(mode, message, tmp_path):
    save_plan(random_plan("mlp", (2,), 0), tmp_path / "plan.json")
    (tmp_path / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", tmp_path / "script.py", mode]
    ended = subprocess.run(
        [*map(str, command), str(tmp_path / "plan.json"), str(tmp_path)],
        env=environment(), capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert time.time() - (tmp_path / "fault").stat().st_mtime < 30
    assert ended.returncode != 0
    assert message in ended.stderr
    assert ended.stderr.count("meshwright: rank") == (mode != "SIGKILL")
    assert started_with(str(tmp_path / "script.py")) == []


@pytest.mark.fuzz
def test_a_run_goes_on_by_itself_after_a_kill_and_a_stopped_rank(tmp_path):
    save_plan(random_plan("mlp", (2,), 0), tmp_path / "plan.json")

    def run(folder: Path, **options) -> str:
        command = [sys.executable, "-m", "runtime.commands.main", "run", tmp_path / "plan.json", "--allow-code"]
        command += ["--steps", 120, "--checkpoints", folder, "--every", 1, "--max-restarts", 2]
        started = subprocess.Popen(list(map(str, command)), env=environment(), stderr=subprocess.PIPE, text=True)
        for step, sent in options.items():
            while not any(path.name >= f"step-{step[1:]:0>8}" for path in folder.glob("step-*")):
                time.sleep(0.01)
            os.kill(max(started_with("runtime.train_main", str(folder))), sent)
        _, printed = started.communicate(timeout=280)
        assert started.returncode == 0, printed
        return printed

    run(tmp_path / "whole")
    printed = run(tmp_path / "parts", _20=signal.SIGKILL, _70=signal.SIGSTOP)
    assert printed.count("restart") == 2
    first, second = (line for line in printed.splitlines() if "restart" in line)
    assert re.match(r"meshwright: rank \d of 2 failed: Signal 9 \(SIGKILL\).*; restart 1 of 2", first)
    assert re.match(r"meshwright: rank \d of 2 died or was stopped: no sign of life for .* s; restart 2 of 2", second)
    files = [sorted((tmp_path / run / "step-00000120").glob("*.safetensors")) for run in ("whole", "parts")]
    assert files[0]
    for one, other in zip(*files, strict=True):
        whole, parts = load_file(one), load_file(other)
        assert whole.keys() == parts.keys()
        assert all(torch.equal(parts[key], tensor) for key, tensor in whole.items())
    losses = [(tmp_path / run / "metrics.jsonl").read_text().splitlines() for run in ("whole", "parts")]
    assert len(losses[0]) == 120
    assert [json.loads(line)["loss"] for line in losses[0]] == [json.loads(line)["loss"] for line in losses[1]]
    assert started_with("runtime.train_main", str(tmp_path)) == []
