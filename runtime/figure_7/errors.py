"""Errors of memory predictions against local runs: Figure 7 of CAPTURE's paper on small models and real processes.

The plans are random, all different and equally likely. Their measured peaks are compared with CAPTURE's predictor, as
published and repaired, which is profiled on such runs too, and with our own formula of torch's engine
(:mod:`planner.layers.plan.memory`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from formulations.capture.predictor import Profile, predict, profile_layers
from formulations.capture.problem import CapturePlan, PartitionProblem, stage_configurations
from formulations.capture.replay import StageReplay
from formulations.capture.sampling import random_plans
from formulations.capture.slips import AS_PUBLISHED, REPAIRED
from formulations.galvatron.costs import CostModel
from planner.layers.plan.memory import engine_peaks, plan_profiles
from runtime.figure_7.runs import LocalRuns

__all__ = ["PREDICTORS", "LocalPlans", "MeasuredPlan", "measured_plans"]

PREDICTORS = ("published", "repaired", "engine")


@dataclass(frozen=True, kw_only=True)
class LocalPlans:
    """The random plans of a model, and how they are run.

    Parameters
    ----------
    runs
        Local runs of the model.
    costs
        States per parameter; links do not matter.
    devices, degrees
        Number of devices of a plan, and the possible numbers of devices of a stage.
    micro_batch
        Samples of a micro-batch.
    """

    runs: LocalRuns
    costs: CostModel
    devices: int
    degrees: Sequence[int]
    micro_batch: int

    def problem(self) -> PartitionProblem:
        """The problem of which they are plans, with the memory of the replay."""
        runs = self.runs
        replay = StageReplay(
            chain=runs.chain,
            borders=runs.borders,
            schedule=runs.schedule,
            micro_batches=runs.micro_batches,
            model=self.costs,
        )
        return replay.problem((self.devices,), stage_configurations(self.degrees), self.micro_batch)

    def profile(self) -> Profile:
        """Run the profiling partitionings, on as many devices.

        Raises
        ------
        TraceError, LaunchError, PlanError
            There are too few devices or layers, or something cannot be run.
        """
        return profile_layers(self.runs, self.devices, self.micro_batch, self.degrees)


@dataclass(frozen=True, slots=True)
class MeasuredPlan:
    """A plan that ran, with predictions of its peaks.

    Parameters
    ----------
    layers, devices
        Numbers of layers and of devices of every stage.
    kinds
        How every stage runs.
    held
        Measured peak bytes of every GPU: that of the fullest of its stage.
    predicted
        By predictor, bytes of every GPU: ``published`` and ``repaired`` CAPTURE's, ``engine`` our formula.
    """

    layers: tuple[int, ...]
    devices: tuple[int, ...]
    kinds: tuple[str, ...]
    held: tuple[int, ...]
    predicted: dict[str, tuple[int, ...]]


def measured_plans(
    plans: LocalPlans, profile: Profile, count: int, seed: int, skipped: int = 0, *, mixed: bool = False
) -> Iterator[MeasuredPlan]:
    """Draw plans, run them one after another, and predict their peaks.

    Parameters
    ----------
    plans
        The plans to draw from.
    profile
        Of the same runs.
    count, seed
        Number of plans, and seed of their random numbers; more plans begin with the same ones.
    skipped
        Number of the first plans that are not run.
    mixed
        Whether to draw only plans in which a stage has several devices.

    Raises
    ------
    TraceError, LaunchError, PlanError
        There are not so many plans, or one cannot be run.
    """
    problem, runs = plans.problem(), plans.runs
    seen: set[CapturePlan] = set()

    def is_new(plan: CapturePlan) -> bool:
        if plan in seen or (mixed and len(plan) == plans.devices):
            return False
        seen.add(plan)
        return True

    predictions = {
        name: predict(profile, problem, plans.micro_batch, slips).problem
        for name, slips in (("published", AS_PUBLISHED), ("repaired", REPAIRED))
    }
    for plan in random_plans(problem, count, seed, is_new)[skipped:]:
        partition = tuple(stage.end - first for first, stage in problem.stages(plan))
        configurations = [problem.configurations[stage.configuration] for stage in plan]
        layers = runs.plan(partition, configurations, plans.micro_batch)

        def by_gpu(stage_peaks: Sequence[int], sizes: Sequence[int] = layers.stage_sizes) -> tuple[int, ...]:
            return tuple(peak for peak, size in zip(stage_peaks, sizes, strict=True) for _ in range(size))

        engine = [peak.nbytes for peak in engine_peaks(layers, plan_profiles(layers, runs.chain))]
        yield MeasuredPlan(
            partition,
            tuple(layers.stage_sizes),
            tuple(map(str, configurations)),
            by_gpu(runs.stage_peaks(layers)),
            {name: tuple(map(int, predicted.gpu_peaks(plan))) for name, predicted in predictions.items()}
            | {"engine": by_gpu(engine)},
        )
