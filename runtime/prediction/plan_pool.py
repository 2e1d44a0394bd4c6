"""Plans of operators run one after another on CPU, in processes that stay and trace a model once.

A launch takes ten times as long as the few steps of a small plan. What is measured is the same: the ranks share the
machine's cores and reuse freed memory as those of a launch, each plan begins from its seed, and its first step is
metered. Processes keep the groups of every plan, so they are started anew after some.
"""

from __future__ import annotations

import os
import tempfile
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Self

import torch
import torch.distributed as dist

from planner.machine.identity import available_cores
from planner.models.references import check_code, reference_of
from planner.plan.decision import canonical_json
from planner.plan.document import Plan
from planner.strategies.traced_step import TracedStep, trace_step
from runtime.job.allocator import keep_freed_memory
from runtime.job.device_memory import check_device_memory
from runtime.job.process_group import LaunchError
from runtime.job.rank_job import RunOptions
from runtime.job.rank_pool import RankPool
from runtime.library.sources import seeded_step
from runtime.measure.run_report import RankReport, RunReport
from runtime.operators.checked_plan import checked_schedule
from runtime.rank_main import merged_report, train_rank

PLANS_OF_PROCESSES = 15
"""Plans after which the processes are started anew."""

MOST_SECONDS = 86_400.0
"""Of one run; a collective has its own limit."""

CPU = torch.device("cpu")


class PlanPool:
    """Local processes that run plans; a context. Plans of one number of ranks follow one another best."""

    def __init__(self) -> None:
        self._pool: RankPool | None = None
        self._plans = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close()

    def _close(self) -> None:
        if self._pool is not None:
            self._pool.close()
        self._pool, self._plans = None, 0

    def run(self, plan: Plan, steps: int) -> RunReport:
        """Train some steps under a plan on CPU, as :func:`runtime.job.launch.run_plan`, which checks nothing here.

        Raises
        ------
        LaunchError
            A rank fails; the next plan has new ones.
        ModelError
            The plan's model is code that was not allowed.
        """
        check_code(plan.decision.model.source)
        ranks = prod(plan.decision.options.mesh)
        if self._pool is not None and (self._pool.size != ranks or self._plans >= PLANS_OF_PROCESSES):
            self._close()
        self._pool = self._pool or RankPool(ranks)
        self._plans += 1
        try:
            texts = self._pool.run(report_of_rank, canonical_json(plan), steps, timeout=MOST_SECONDS)
        except LaunchError as error:
            self._close()
            raise LaunchError(str(error).strip().splitlines()[-1]) from None
        except BaseException:
            self._close()
            raise
        return merged_report(plan, [RankReport.model_validate_json(text) for text in texts], _options(steps), CPU)


_traced: dict[str, TracedStep] = {}
"""The step that this process traced last, by its model."""


def report_of_rank(text: str, steps: int) -> str:
    """Report as JSON of a plan's run, of which this process is a rank."""
    ranks = dist.get_world_size()
    os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
    torch.set_num_threads(max(1, available_cores() // ranks))
    keep_freed_memory()
    plan = Plan.model_validate_json(text)
    check_device_memory(plan.peak_bytes, CPU)
    check_code(plan.decision.model.source, allowed=True)  # by the process that has the pool
    model, reference = canonical_json(plan.decision.model), reference_of(plan.decision.model)
    step, seeded = seeded_step(reference)
    if model not in _traced:
        _traced.clear()
        _traced[model] = trace_step(
            step.module, step.example_args, step.example_kwargs, step.loss_fn, reference.reduce_dtype
        )
    traced = _traced[model]
    schedule = checked_schedule(plan, traced, ranks)
    return train_rank(plan, step, seeded, traced, schedule, _options(steps), CPU).model_dump_json()


def _options(steps: int) -> RunOptions:
    none = Path(tempfile.gettempdir())
    return RunOptions(plan=none, steps=steps, check=False, data=None, device=CPU.type, report=None, scratch=none)
