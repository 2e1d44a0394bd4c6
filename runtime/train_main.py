"""Main program of every rank of a training that is kept: checkpoints, metrics, and resume from the last of them.

Started by :mod:`runtime.job.launch` for ``meshwright run --checkpoints``, or by torch's own launcher, for plans of
operators and of layers::

    torchrun --nproc-per-node 4 -m runtime.train_main plan.json --steps 1000 --checkpoints folder --every 100
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from math import isnan
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from formulations.problem.files import write_text_atomically
from planner.models.references import reference_of
from planner.plan.document import Plan
from planner.torch_adapter.tracing.step_module import StepArguments
from runtime.job.membership import joined
from runtime.job.planned_device import kind_for_rank
from runtime.job.process_group import LaunchError, rank_device
from runtime.job.rank_job import RunOptions, parse_options
from runtime.layers.reference import model_reference
from runtime.library.loading import load
from runtime.library.sources import planned_step
from runtime.library.step import Step
from runtime.library.trainer import Trainer
from runtime.measure.batches import Batches

METRICS_FILE = "metrics.jsonl"


@dataclass(frozen=True, eq=False)
class StepBatches:
    """Global batches of the steps of a run, one after the other."""

    batches: Batches
    steps: int

    @classmethod
    def of(cls, step: Step, data: Path | None, steps: int) -> StepBatches:
        """Batches of a loaded step, from a text or as the model's example."""
        plan = step.plan
        named = planned_step(reference_of(plan.decision.model) if isinstance(plan, Plan) else model_reference(plan))
        arguments = StepArguments.of(named.module, named.example_args, named.example_kwargs)
        micro_batches = plan.decision.options.grad_accum if isinstance(plan, Plan) else 1
        return cls(Batches.of(named.module, arguments, arguments.tensors, data, micro_batches), steps)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for number in range(self.steps):
            batch = self.batches.of_step(number)
            yield {key: t.flatten(0, 1) for key, t in batch.items()} if self.batches.micro_batches > 1 else batch


def train_rank(options: RunOptions) -> str:
    """Do this rank's part; the number of steps and the last loss as JSON, null where no step was left to do.

    Raises
    ------
    LaunchError
        The job does not have the plan's ranks, or a rank fails.
    """
    if options.checkpoints is None:
        raise LaunchError("checkpoints: a training that is kept has a folder, give --checkpoints FOLDER")
    device = rank_device(kind_for_rank(options.device, options.plan))
    with joined(device):
        step = load(options.plan, device=device, allow_code=options.allow_code)
        metrics = options.checkpoints / METRICS_FILE
        data = StepBatches.of(step, options.data, options.steps)
        trainer = Trainer(
            step, data, steps=options.steps, checkpoints=options.checkpoints, every=options.every, metrics=metrics
        )
        loss = trainer.fit()
        report = json.dumps({"steps": step.steps, "loss": None if isnan(loss) else loss})
        if options.report is not None and dist.get_rank() == 0:
            write_text_atomically(options.report, report)
    return report


@record
def main() -> int:
    """Run one rank."""
    train_rank(parse_options("runtime.train_main"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
