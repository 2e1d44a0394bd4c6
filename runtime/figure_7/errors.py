"""Errors of memory predictions against local runs: Figure 7 of CAPTURE's paper on small models and real processes.

The plans are random, all different and equally likely among those whose stages have equal numbers of devices, as the
layer executor requires. Their measured peaks are compared with CAPTURE's predictor, as published and repaired, which is
profiled on such runs too, and with our own formula of torch's engine (:mod:`planner.layers.plan.memory`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from formulations.capture.predictor import Profile, predict, profile_layers
from formulations.capture.problem import CapturePlan, PartitionProblem, stage_configurations
from formulations.capture.replay import StageReplay
from formulations.capture.sampling import PredictionErrors, prediction_errors, random_plans
from formulations.capture.slips import AS_PUBLISHED, REPAIRED
from formulations.galvatron.costs import CostModel
from planner.layers.plan.document import LayerPlan
from planner.layers.plan.memory import engine_peaks, plan_profiles
from runtime.figure_7.runs import LocalRuns

__all__ = ["LocalPlans", "errors_of_predictions"]


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


def errors_of_predictions(plans: LocalPlans, profile: Profile, count: int, seed: int) -> dict[str, PredictionErrors]:
    """Errors of predictions against measured peaks.

    Parameters
    ----------
    plans
        The plans to draw from.
    profile
        Of the same runs.
    count, seed
        Number of plans, and seed of their random numbers.

    Returns
    -------
    dict
        By predictor: ``published`` and ``repaired`` CAPTURE's, ``engine`` our formula.

    Raises
    ------
    TraceError, LaunchError, PlanError
        There are not so many plans, or one cannot be run.
    """
    problem, runs = plans.problem(), plans.runs
    seen: set[CapturePlan] = set()

    def is_new(plan: CapturePlan) -> bool:
        degrees = {problem.configurations[stage.configuration].devices for stage in plan}
        if len(degrees) > 1 or plan in seen:
            return False
        seen.add(plan)
        return True

    def as_layers(plan: CapturePlan) -> LayerPlan:
        partition = [stage.end - first for first, stage in problem.stages(plan)]
        return runs.plan(partition, [problem.configurations[s.configuration] for s in plan], plans.micro_batch)

    def by_gpu(stage_peaks: Sequence[int]) -> list[int]:
        return [peak for peak in stage_peaks for _ in range(plans.devices // len(stage_peaks))]

    drawn = {plan: as_layers(plan) for plan in random_plans(problem, count, seed, is_new)}
    held = [by_gpu(runs.stage_peaks(layers)) for layers in drawn.values()]
    predicted: dict[str, list[Sequence[int]]] = {}
    for name, slips in (("published", AS_PUBLISHED), ("repaired", REPAIRED)):
        prediction = predict(profile, problem, plans.micro_batch, slips).problem
        predicted[name] = [prediction.gpu_peaks(plan) for plan in drawn]
    predicted["engine"] = [
        by_gpu([peak.nbytes for peak in engine_peaks(layers, plan_profiles(layers, runs.chain))])
        for layers in drawn.values()
    ]
    return {name: prediction_errors(peaks, held) for name, peaks in predicted.items()}
