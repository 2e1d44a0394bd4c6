"""Predicted beside measured time and memory of plans that ran: errors, and whether their order is right."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median

import numpy as np
from numpy.typing import ArrayLike, NDArray

from planner.common.plan_error import PlanError
from planner.layers.plan.document import LayerPlan
from planner.plan.document import Plan
from runtime.job.launch import run_plan
from runtime.job.planned_device import calibration_note, device_of_run
from runtime.layers.launch import run_layer_plan
from runtime.measure.run_report import TrainingReport
from runtime.prediction.plan_pool import PlanPool

STEPS = 4
"""Steps of a run; the first is metered, and the median of the others counts."""


@dataclass(frozen=True, slots=True)
class ValidatedPlan:
    """A plan that ran: seconds of a step and peak bytes of a rank, as predicted and as measured.

    Of several runs ``runs_s`` has the seconds of each, ``measured_s`` their median, ``measured_bytes`` the most.
    """

    name: str
    predicted_s: float
    measured_s: float
    predicted_bytes: int
    measured_bytes: int
    runs_s: tuple[float, ...] = ()

    @property
    def time_error(self) -> float:
        """Relative error of the predicted time: positive where the plan was slower."""
        return self.measured_s / self.predicted_s - 1.0

    @property
    def memory_error(self) -> float:
        """Relative error of the predicted peak: positive where more was needed."""
        return self.measured_bytes / self.predicted_bytes - 1.0


@dataclass(frozen=True)
class Validation:
    """Plans that ran on one machine."""

    plans: tuple[ValidatedPlan, ...]

    @property
    def mean_time_error(self) -> float:
        """Mean absolute relative error of the predicted times."""
        return float(np.mean([abs(plan.time_error) for plan in self.plans]))

    @property
    def mean_memory_error(self) -> float:
        """Mean absolute relative error of the predicted peaks."""
        return float(np.mean([abs(plan.memory_error) for plan in self.plans]))

    @property
    def rank_correlation(self) -> float | None:
        """Spearman's correlation of predicted and measured times; None with fewer than three plans."""
        if len(self.plans) < 3:
            return None
        return _rank_correlation([plan.predicted_s for plan in self.plans], [plan.measured_s for plan in self.plans])

    @property
    def repeatability(self) -> float | None:
        """Spearman's correlation of two rounds of runs, as a mean over pairs of rounds: what no prediction can exceed.

        None with fewer than three plans, or one round.
        """
        rounds = list(zip(*(plan.runs_s for plan in self.plans), strict=True))
        if len(self.plans) < 3 or len(rounds) < 2:
            return None
        return float(np.mean([_rank_correlation(one, other) for one, other in combinations(rounds, 2)]))

    @property
    def mean_spread(self) -> float | None:
        """Mean over plans of the slowest run's seconds over the fastest's, less 1; None with one round."""
        if any(len(plan.runs_s) < 2 for plan in self.plans):
            return None
        return float(np.mean([max(plan.runs_s) / min(plan.runs_s) - 1.0 for plan in self.plans]))

    @property
    def chosen_over_best(self) -> float:
        """Measured time of the plan that was predicted to be the fastest, over that of the fastest."""
        chosen = min(self.plans, key=lambda plan: plan.predicted_s)
        return chosen.measured_s / min(plan.measured_s for plan in self.plans)


def validate(
    plans: Sequence[tuple[str, Plan | LayerPlan]],
    *,
    steps: int = STEPS,
    rounds: int = 1,
    device: str | None = None,
    progress: Callable[[str], None] = lambda _: None,
) -> Validation:
    """Run plans one after another and compare each with its prediction; several of operators in one pool of processes.

    A machine's speed changes over minutes. In several rounds a plan runs at several times, others between.

    Parameters
    ----------
    plans
        Names and plans, of operators or of layers.
    steps
        Steps of each run, at least 2.
    rounds
        Runs of each plan; a round runs every plan once.
    device
        As :func:`runtime.job.launch.run_plan` takes it.
    progress
        Called with the name of each plan before it runs.

    Raises
    ------
    ValueError
        No plans, fewer than two steps, or no round.
    PlanError
        A plan of layers predicts no time or no peak.
    LaunchError
        A run failed.
    """
    if not plans or steps < 2 or rounds < 1:
        raise ValueError(
            f"{len(plans)} plans of {steps} steps in {rounds} rounds: give at least one plan, one round, and 2 steps, "
            "of which one is timed"
        )
    predicted = [predicted_figures(name, plan) for name, plan in plans]
    times: list[list[float]] = [[] for _ in plans]
    peaks = [0] * len(plans)
    with PlanPool() as pool:
        for number in range(rounds):
            for at, (name, plan) in enumerate(plans):
                progress(name if rounds == 1 else f"{name}, round {number + 1} of {rounds}")
                report = _report(plan, steps, device, pool if len(plans) * rounds > 1 else None)
                assert report.measured_step_s is not None
                times[at].append(report.measured_step_s)
                peaks[at] = max(peaks[at], *report.measured_peak_bytes)
    return Validation(
        tuple(
            ValidatedPlan(name, seconds, median(runs), planned, peak, tuple(runs))
            for (name, _), (seconds, planned), runs, peak in zip(plans, predicted, times, peaks, strict=True)
        )
    )


def _report(plan: Plan | LayerPlan, steps: int, device: str | None, pool: PlanPool | None) -> TrainingReport:
    """A run; in the pool where there is one for it."""
    if pool is None or not isinstance(plan, Plan) or device_of_run(device, plan) != "cpu":
        return run_steps(plan, steps, device)
    if note := calibration_note(plan):
        warnings.warn(note, stacklevel=3)
    return pool.run(plan, steps)


def run_steps(plan: Plan | LayerPlan, steps: int, device: str | None, *, check: bool = False) -> TrainingReport:
    """Train some steps under a plan of either kind, as :func:`runtime.job.launch.run_plan`.

    Raises
    ------
    LaunchError
        The run failed.
    """
    if isinstance(plan, Plan):
        return run_plan(plan, steps=steps, device=device, check=check)
    return run_layer_plan(plan, steps=steps, device=device, check=check)


def predicted_figures(name: str, plan: Plan | LayerPlan) -> tuple[float, int]:
    """Seconds of a step, and the peak of the fullest device, the engine's own memory included.

    Raises
    ------
    PlanError
        A plan of layers predicts no time or no peak; the message has its name.
    """
    if isinstance(plan, Plan):
        return plan.objective_seconds, plan.peak_bytes
    record = plan.record
    if record is None or not record.objective_seconds or not record.engine_peaks:
        raise PlanError(f"plan {name} predicts no time or no peak: give one that a formulation made")
    return record.objective_seconds, plan.held_bytes


def _rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    return float(np.corrcoef(_ranks(one), _ranks(other))[0, 1])


def _ranks(values: ArrayLike) -> NDArray[np.float64]:
    """Ranks of values, ties with the mean of theirs."""
    array = np.asarray(values, dtype=np.float64)
    below = (array[None, :] < array[:, None]).sum(axis=1)
    equal = (array[None, :] == array[:, None]).sum(axis=1)
    return np.asarray(below + (equal - 1) / 2.0, dtype=np.float64)
