"""CAPTURE's profiler on real runs: partitionings of a small model on local processes, and the peaks that they have.

It profiles what the layer executor really holds, where :class:`formulations.models.capture_replay.StageReplay` profiles
a replay. A run starts its processes anew, which takes seconds; whoever has processes already gives them as `measure`.

:func:`errors_of_predictions` is Figure 7 of the paper on such runs: random plans, what CAPTURE's predictor says of them
as published and repaired, what our own formula of the engine says, and what is measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from formulations.models.capture import stage_configurations
from formulations.models.capture_replay import PipelinedChain, StageReplay
from formulations.models.capture_slips import AS_PUBLISHED, REPAIRED
from formulations.models.galvatron_costs import CostModel
from formulations.models.galvatron_strategies import LayerStrategy
from formulations.models.pipeline_schedule import Schedule
from formulations.searches.capture_predictor import Profile, predict
from formulations.searches.capture_sampling import PredictionErrors, prediction_errors, random_plans
from planner.layer_plan import LayerPlan, StagePlan
from planner.layer_plan_check import check_layer_plan
from planner.layer_plan_memory import engine_peaks, plan_profiles
from planner.layer_request import planned_model
from planner.layer_settings import strategy_settings
from planner.models import ModelReference
from planner.optimizers import OptimizerName
from runtime.layer_launch import run_layer_plan

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


@dataclass(frozen=True, kw_only=True)
class LocalRuns(PipelinedChain):
    """Local runs of a model as a profiled system (:class:`formulations.models.capture_replay.ProfiledSystem`).

    Parameters
    ----------
    chain, borders, schedule, micro_batches
        As in :class:`formulations.models.capture_replay.PipelinedChain`; of the chain names count, and which layers
        tensor parallelism leaves whole.
    reference
        Which model; its batch is not used.
    optimizer
        A name of :data:`planner.optimizers.OPTIMIZERS`.
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
            It cannot be run so.
        """
        return self.stage_peaks(self.plan(partition, [configuration] * len(partition), micro_batch))

    def stage_peaks(self, plan: LayerPlan) -> tuple[int, ...]:
        """Measured peak of the fullest rank of every stage of a plan."""
        ranks = self.measure(plan)
        each = plan.stage_devices
        return tuple(max(ranks[first : first + each]) for first in range(0, plan.devices, each))

    def plan(self, partition: Sequence[int], configurations: Sequence[LayerStrategy], micro_batch: int) -> LayerPlan:
        """Return the layer plan of stages with equal numbers of devices.

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
            The configurations have different degrees, or samples do not divide.
        """
        stages, layer = [], 0
        for count, configuration in zip(partition, configurations, strict=True):
            modules = self.chain.layers[self.borders[layer] : self.borders[layer + count]]
            layer += count
            stages.append(StagePlan(layers=tuple(strategy_settings(module, configuration) for module in modules)))
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


def errors_of_predictions(
    runs: LocalRuns,
    profile: Profile,
    costs: CostModel,
    devices: int,
    degree: int,
    micro_batch: int,
    count: int,
    seed: int,
) -> dict[str, PredictionErrors]:
    """Errors of predictions against measured peaks, on different random plans with stages of one degree.

    Parameters
    ----------
    runs
        What runs.
    profile
        Of these runs.
    costs
        States per parameter; links do not matter.
    devices, degree
        Of a plan, and of each of its stages.
    micro_batch
        Samples of a micro-batch.
    count, seed
        How many plans are drawn, of which equal ones run once, and of what random numbers.

    Returns
    -------
    dict
        By predictor: ``published`` and ``repaired`` CAPTURE's, ``engine`` that of
        :mod:`planner.layer_plan_memory`.
    """
    replay = StageReplay(
        chain=runs.chain,
        borders=runs.borders,
        schedule=runs.schedule,
        micro_batches=runs.micro_batches,
        model=costs,
    )
    configurations = stage_configurations((degree,))
    problem = replay.problem((devices,), configurations, micro_batch)
    drawn = list(dict.fromkeys(random_plans(problem, count, seed)))
    plans = [
        runs.plan(
            [stage.end - first for first, stage in problem.stages(plan)],
            [configurations[stage.configuration] for stage in plan],
            micro_batch,
        )
        for plan in drawn
    ]

    def by_gpu(stage_peaks: Sequence[int]) -> list[int]:
        return [peak for peak in stage_peaks for _ in range(degree)]

    held = [by_gpu(runs.stage_peaks(plan)) for plan in plans]
    said: dict[str, Sequence[Sequence[int]]] = {
        name: [predict(profile, problem, micro_batch, slips).problem.gpu_peaks(plan) for plan in drawn]
        for name, slips in (("published", AS_PUBLISHED), ("repaired", REPAIRED))
    }
    said["engine"] = [
        by_gpu([peak.nbytes for peak in engine_peaks(plan, plan_profiles(plan, runs.chain))]) for plan in plans
    ]
    return {name: prediction_errors(predicted, held) for name, predicted in said.items()}
