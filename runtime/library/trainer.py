"""A loop for those who have none: steps, metrics, checkpoints, resume."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist
from torch.profiler import profile as recording

from formulations.problem.files import write_text_atomically
from runtime.job.watchdog import item_of, watched
from runtime.library.batch import Batch
from runtime.library.checkpoint import latest_checkpoint
from runtime.library.data import TrainingData
from runtime.library.errors import BatchError
from runtime.library.step import Step
from runtime.library.writing import lock_folder


class Scheduler(Protocol):
    """A learning-rate scheduler of torch."""

    def step(self) -> None:
        """Set the rates of the next step."""

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""


class Trainer:
    """Trains a step on data until a number of steps; goes on where the last checkpoint was written.

    Parameters
    ----------
    step
        Of :func:`runtime.load`.
    data
        Batches, passed over as often as needed. Of a ``DataLoader`` with the plan's ``batch_size``, shuffled or not, or
        with a :class:`ShareSampler` as its ``batch_sampler``, each rank reads its rows alone, and a job that goes on
        reads none again. Any other iterable gives the same global batches on every rank in each pass, which is looked
        at; it resumes by passing over what was read. ``set_epoch`` gets the number of the pass, and a sampler of torch
        a generator that is seeded by its own one's seed and that number.
    steps
        Optimizer steps in all.
    scheduler
        Stepped after each step.
    checkpoints
        Folder; None: no checkpoints.
    every
        Steps between checkpoints; the last step always has one. 0: that one alone.
    keep
        Checkpoints that stay.
    metrics
        File that gets a line of JSON per step, from rank 0.
    evaluation
        Batches whose mean loss is written; None: none.
    evaluate_every
        Steps between evaluations.
    progress
        Whether rank 0 shows a bar, where stderr is a terminal and rich is installed.
    resume
        Whether to go on from the latest checkpoint.
    beside
        Whether checkpoints are copied to host memory and written beside the next steps.
    profile
        Numbers of steps that ``torch.profiler`` records.
    traces
        Folder of their traces, one file for each step and rank; needed with ``profile``.
    """

    def __init__(
        self,
        step: Step,
        data: Iterable[Batch],
        *,
        steps: int,
        scheduler: Scheduler | None = None,
        checkpoints: Path | str | None = None,
        every: int = 0,
        keep: int | None = 3,
        metrics: Path | str | None = None,
        evaluation: Iterable[Batch] | None = None,
        evaluate_every: int = 0,
        progress: bool = True,
        resume: bool = True,
        beside: bool = False,
        profile: Collection[int] = (),
        traces: Path | str | None = None,
    ) -> None:
        if profile and traces is None:
            raise ValueError(f"profile {sorted(profile)}: give traces, the folder of the recorded steps")
        self.step, self._data, self._steps = step, TrainingData(step, data), steps
        self._scheduler, self._progress = scheduler, progress
        self._checkpoints = None if checkpoints is None else Path(checkpoints)
        self._every, self._keep = every, keep
        self._metrics = Path(metrics) if metrics is not None and dist.get_rank() == 0 else None
        self._evaluation = None if evaluation is None else TrainingData(step, evaluation)
        self._evaluate_every = evaluate_every
        self._epoch = self._batch = 0
        self._resume, self._beside = resume, beside
        self._profiled, self._traces = frozenset(profile), None if traces is None else Path(traces)

    def fit(self) -> float:
        """Train; the loss of the last step. A collective of all ranks.

        Raises
        ------
        BatchError
            The data ends before a pass has a batch.
        CheckpointError
            A checkpoint cannot be written or read.
        """
        if self._checkpoints is not None:
            lock_folder(self._checkpoints)
        self._go_on()
        loss = float("nan")
        with self._bar() as advance:
            while self.step.steps < self._steps:
                before, began = self.step.steps, self._batch
                for batch in self._data.batches(self._epoch, self._batch):
                    loss = self._one(batch)
                    advance(loss)
                    if self.step.steps >= self._steps:
                        break
                else:
                    self._epoch, self._batch = self._epoch + 1, 0
                if self.step.steps == before and not began:
                    raise BatchError(
                        f"the data has no batch after step {before}: give an iterable that can be "
                        "passed over again, not an iterator"
                    )
        self.step.wait_for_save()
        return loss

    def _go_on(self) -> None:
        found = latest_checkpoint(self._checkpoints) if self._resume and self._checkpoints is not None else None
        if found is not None:
            position = self.step.resume(found, self._scheduler)
            self._epoch, self._batch = int(position["epoch"]), int(position["batch"])
        if self._metrics is not None:
            lines = self._metrics.read_text(encoding="utf-8").splitlines() if self._metrics.exists() else []
            # What an interrupted job did after its last checkpoint is done again.
            kept = [line for line in lines if json.loads(line)["step"] <= self.step.steps] if found else []
            self._metrics.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomically(self._metrics, "".join(line + "\n" for line in kept))

    def _one(self, batch: Batch) -> float:
        started = time.perf_counter()
        rates = [float(group["lr"]) for group in self.step.optimizer.param_groups]
        with self._profiling(self.step.steps + 1), watched("step"):  # on CUDA the loss is what waits for the others
            loss = item_of(self.step(batch))
        if self._scheduler is not None:
            self._scheduler.step()
        self._batch += 1
        number = self.step.steps
        line = {"step": number, "epoch": self._epoch, "loss": loss, "lr": rates[0]}
        if self.step.gradient_norm is not None:
            line["gradient_norm"] = self.step.gradient_norm.item()
        line["seconds"] = time.perf_counter() - started
        self._write(line)
        if self._evaluation is not None and self._evaluate_every and number % self._evaluate_every == 0:
            losses = [item_of(self.step.evaluate(held_out)) for held_out in self._evaluation.batches(0, 0)]
            self._write({"step": number, "evaluation_loss": sum(losses) / len(losses)})
        due = number == self._steps or (self._every and number % self._every == 0)
        if self._checkpoints is not None and due:
            position = {"epoch": self._epoch, "batch": self._batch}
            self.step.save(self._checkpoints, self._scheduler, position, self._keep, wait=not self._beside)
        return loss

    @contextmanager
    def _profiling(self, number: int) -> Iterator[None]:
        """Record a step, if it is one of the chosen."""
        if number not in self._profiled or self._traces is None:
            yield
            return
        with recording(record_shapes=True, profile_memory=True) as recorded:
            yield
        self._traces.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(self._traces / f"step-{number:08d}-rank-{dist.get_rank()}.json"))

    def _write(self, line: dict[str, Any]) -> None:
        if self._metrics is not None:
            with self._metrics.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    @contextmanager
    def _bar(self) -> Iterator[Any]:
        """A bar of steps; the function that moves it."""
        shown = self._progress and dist.get_rank() == 0 and sys.stderr.isatty()
        try:
            from rich.console import Console
            from rich.progress import Progress
        except ImportError:
            shown = False
        if not shown:
            yield lambda loss: None
            return
        with Progress(console=Console(stderr=True)) as bar:
            task = bar.add_task("training", total=self._steps, completed=self.step.steps)
            yield lambda loss: bar.update(task, advance=1, description=f"loss {loss:.4g}")
