"""CAPTURE's profiler on real runs: measured peaks of partitionings of a small model on local processes.

It profiles the memory of the layer executor, where :class:`formulations.capture.replay.StageReplay` profiles a replay.
A run starts new processes, which takes seconds; :func:`measured_by` runs plans on the processes of a pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from formulations.capture.replay import PipelinedChain
from formulations.galvatron.strategies import LayerStrategy
from formulations.layers.pipeline_schedule import Schedule
from planner.graph.optimizers import OptimizerName
from planner.layers.plan.check import check_layer_plan
from planner.layers.plan.document import LayerPlan, StagePlan
from planner.layers.plan.settings import strategy_settings
from planner.models.references import ModelReference, load_step, planned_model
from planner.torch_adapter.meters.resized_storages import ResizedStorageMeter
from runtime.job.rank_pool import RankPool
from runtime.layers.check import check_model
from runtime.layers.families.registry import model_family
from runtime.layers.launch import run_layer_plan
from runtime.layers.mesh import plan_meshes
from runtime.layers.reference import model_reference
from runtime.layers.training import LayerTraining
from runtime.measure.local_shards import reader_of
from runtime.measure.memory_meter import MemoryMeter

STEPS = 2
"""As in the paper."""

Measure = Callable[[LayerPlan], Sequence[int]]
"""Peak bytes of every rank of a plan, the ranks of a stage after those of the stage before."""


def measured_peaks(plan: LayerPlan) -> Sequence[int]:
    """Peaks of a plan that is run for two steps on processes of its own.

    Raises
    ------
    LaunchError
        The run cannot be started, or a rank fails.
    """
    return run_layer_plan(plan, steps=STEPS).measured_peak_bytes


def measured_by(pool: RankPool) -> Measure:
    """Peaks of plans that are run for two steps on the ranks of a pool, of which a plan takes all.

    The returned function raises :class:`runtime.job.process_group.LaunchError` where a rank fails.
    """
    return lambda plan: pool.run(peak_of_rank, plan.model_dump_json())


def peak_of_rank(text: str) -> int:
    """Run two steps of a plan, of which this process is a rank, and return its peak.

    Parameters
    ----------
    text
        The plan as JSON.

    Raises
    ------
    FamilyError, LaunchError, PlanError
        The plan or its model cannot be run, or not on so many ranks.
    """
    training, batch = training_of_rank(text)
    meter = MemoryMeter(torch.device("cpu"), training.resident_tensors(), ResizedStorageMeter())
    for _ in range(STEPS):
        training.step(batch, meter)
    return meter.peak_bytes


def training_of_rank(text: str) -> tuple[LayerTraining, dict[str, Any]]:
    """Part of this process in a plan, on the CPU, and the example batch; parameters as for :func:`peak_of_rank`."""
    plan = LayerPlan.model_validate_json(text)
    device = torch.device("cpu")
    initial, step = (load_step(model_reference(plan), where) for where in ("cpu", "meta"))
    family = model_family(step)
    check_model(plan, family, step.example_kwargs)
    named = [*initial.module.named_parameters(), *initial.module.named_buffers()]
    state = {name: tensor.detach() for name, tensor in named}
    training = LayerTraining(plan, family, step.module, plan_meshes(plan, device.type), reader_of(state), device)
    return training, dict(initial.example_kwargs)


@dataclass(frozen=True, kw_only=True)
class LocalRuns(PipelinedChain):
    """Local runs of a model as a profiled system (:class:`formulations.capture.replay.ProfiledSystem`).

    Parameters
    ----------
    chain, borders, schedule, micro_batches
        As in :class:`formulations.capture.replay.PipelinedChain`; of the chain names count, and which layers
        tensor parallelism leaves whole.
    reference
        Which model; its batch is not used.
    optimizer
        A name of :data:`planner.graph.optimizers.OPTIMIZERS`.
    measure
        Runs a plan.
    """

    reference: ModelReference
    optimizer: OptimizerName = "adamw"
    measure: Measure = measured_peaks
    name: str = "local runs"

    def run(self, partition: Sequence[int], configuration: LayerStrategy, micro_batch: int) -> tuple[int, ...]:
        """Run a partitioning and return the peak of every stage: that of its fullest rank.

        Raises
        ------
        PlanError, LaunchError
            The partitioning cannot be run.
        """
        return self.stage_peaks(self.plan(partition, [configuration] * len(partition), micro_batch))

    def stage_peaks(self, plan: LayerPlan) -> tuple[int, ...]:
        """Measured peak of the fullest rank of every stage of a plan."""
        ranks = self.measure(plan)
        ends = list(accumulate(plan.stage_sizes, initial=0))
        return tuple(max(ranks[first:end]) for first, end in pairwise(ends))

    def plan(self, partition: Sequence[int], configurations: Sequence[LayerStrategy], micro_batch: int) -> LayerPlan:
        """Return the layer plan of stages.

        Parameters
        ----------
        partition
            Layers of every stage.
        configurations
            How every stage runs.
        micro_batch
            Samples of a micro-batch.

        Raises
        ------
        PlanError
            Samples do not divide.
        """
        stages, layer = [], 0
        is_even = len({configuration.devices for configuration in configurations}) == 1
        for count, configuration in zip(partition, configurations, strict=True):
            modules = self.chain.layers[self.borders[layer] : self.borders[layer + count]]
            layer += count
            settings = tuple(strategy_settings(module, configuration) for module in modules)
            stages.append(StagePlan(layers=settings, devices=None if is_even else configuration.devices))
        made = LayerPlan(
            model=planned_model(self.reference, micro_batch * self.micro_batches),
            devices=sum(configuration.devices for configuration in configurations),
            stages=tuple(stages),
            micro_batches=self.micro_batches,
            schedule="gpipe" if self.schedule is Schedule.GPIPE else "1f1b",
            optimizer=self.optimizer,
            seed=self.reference.seed,
        )
        check_layer_plan(made)
        return made
