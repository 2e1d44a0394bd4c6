"""The part ``figure-7-local`` of the suite ``capture``: Figure 7 of its paper on small models that really run here.

Two small language models run as pipelines of four local processes. The tables ``figure_7_local`` of ``papers``
(:mod:`runtime.prediction.local_tables.figure_7`) have data and tensor parallelism within stages too, plan by plan.

An instance is a model with a schedule, a solver is a predictor: ``published`` and ``repaired`` CAPTURE's, ``engine``
our formula of the memory of torch's engine, which needs no profiling runs. The objective is the mean error of the
predicted peak of a plan's fullest GPU, in millionths of the measured peak. The histograms of errors are in the
messages, and for all models together in the last lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import comb

import numpy as np

from formulations.capture.predictor import FloatArray
from formulations.capture.sampling import PredictionErrors
from formulations.layers.pipeline_schedule import Schedule
from formulations.problem.solution import SolveOptions, SolveResult, Status
from formulations.solvers import SolverPool
from formulations.solvers.processes.worker_process import read_status_bytes
from planner.benchmarks import BenchInstance, BenchRow, Suite, SuiteError
from planner.benchmarks.suites import OwnSolver, ReportProgress, check_names
from planner.papers.capture.bench import ERROR_SHARES, PARTS, capture_suite
from runtime.figure_7.errors import PREDICTORS
from runtime.prediction.local_tables.figure_7_cases import MODELS, LocalCase, MeasuredErrors, measured_errors

__all__ = ["LOCAL_PART", "capture_suite_with_runs"]

LOCAL_PART = "figure-7-local"
PLANS = 500
"""As in the paper."""

SCHEDULES = (Schedule.GPIPE, Schedule.ONE_F_ONE_B)


def capture_suite_with_runs(parts: Sequence[str] | None, plans: int = PLANS) -> Suite:
    """Make the suite ``capture``, whose part :data:`LOCAL_PART` runs models.

    Parameters
    ----------
    parts
        Names of :data:`planner.papers.capture.bench.PARTS` and :data:`LOCAL_PART`; all but the latter if None.
    plans
        Random plans of that part for each schedule, shared by its models.

    Raises
    ------
    SuiteError
        There is no such part, or there are not so many plans.
    """
    chosen = tuple(PARTS) if parts is None else tuple(parts)
    check_names("capture", "part", chosen, (*PARTS, LOCAL_PART))
    suite = capture_suite([part for part in chosen if part != LOCAL_PART])
    if LOCAL_PART not in chosen:
        return suite
    shares = {model: len(range(number, plans, len(MODELS))) for number, model in enumerate(MODELS)}
    cases = {LocalCase(model, schedule): shares[model] for schedule in SCHEDULES for model in MODELS if shares[model]}
    for case, share in cases.items():
        most = comb(case.blocks + 1, case.devices - 1)
        if share > most:
            raise SuiteError(
                f"suite capture: {plans} plans: a model of {case.blocks + 2} layers on {case.devices} devices has "
                f"{most} different ones; use at most {most * len(MODELS)}"
            )

    def summarize(rows: Sequence[BenchRow]) -> list[str]:
        others = [row for row in rows if not row.instance.startswith(LOCAL_PART)]
        above = suite.summarize(others) if others and suite.summarize is not None else []
        seeds = {row.instance: row.seed for row in rows}
        found = {
            case: measured_errors(case, share, seeds[str(case)]) for case, share in cases.items() if str(case) in seeds
        }
        return [*above, *_summary(found)]

    return replace(
        suite,
        instances=(*suite.instances, *(_instance(case, share) for case, share in cases.items())),
        notes=(*suite.notes, f"{LOCAL_PART}: objectives are mean errors of plans in millionths, by measured peaks"),
        summarize=summarize,
    )


def histogram(errors: FloatArray) -> str:
    """Counts of errors, rounded to whole percents: ``-1: 3, 0: 17``."""
    counts = Counter(np.rint(100 * errors).astype(int).tolist())
    return ", ".join(f"{percent}: {count}" for percent, count in sorted(counts.items()))


def _instance(case: LocalCase, plans: int) -> BenchInstance:
    own: dict[str, OwnSolver] = {predictor: partial(_solve, case, plans, predictor) for predictor in PREDICTORS}
    return BenchInstance(str(case), f"capture_errors_{case.schedule}", None, own_solvers=own)


def _solve(
    case: LocalCase,
    plans: int,
    predictor: str,
    options: SolveOptions,
    progress: ReportProgress,
    pool: SolverPool | None,
) -> SolveResult:
    """The row of a predictor; its seconds are those of the runs, which all predictors of an instance share."""
    del progress, pool
    found = measured_errors(case, plans, options.seed)
    errors = found.by_predictor[predictor]
    words = (
        f"{len(errors.per_plan)} plans, {found.profiling_runs} profiling runs; {_shares(errors)}; errors in percent, "
        f"GPUs: {histogram(errors.per_gpu)}; plans: {histogram(errors.per_plan)}"
    )
    return SolveResult(
        Status.FEASIBLE,
        None,
        round(1e6 * float(np.abs(errors.per_plan).mean())),
        None,
        None,
        predictor,
        found.seconds,
        0.0,
        read_status_bytes("self", "VmHWM"),
        (),
        (),
        words,
    )


def _shares(errors: PredictionErrors) -> str:
    shares = [errors.within(share) for share in ERROR_SHARES]
    per_gpu, per_plan = (", ".join(f"{100 * share[k]:.1f}" for share in shares) for k in (0, 1))
    within = ", ".join(f"{100 * share:.0f}" for share in ERROR_SHARES)
    return f"within {within} %: {per_gpu} % of predictions for GPUs, {per_plan} % for plans"


def _summary(found: Mapping[LocalCase, MeasuredErrors]) -> list[str]:
    """Errors of all models together, by schedule and predictor."""
    lines = []
    for schedule in dict.fromkeys(case.schedule for case in found):
        alike = [measured.by_predictor for case, measured in found.items() if case.schedule is schedule]
        for predictor in PREDICTORS:
            errors = PredictionErrors(
                np.concatenate([errors[predictor].per_gpu for errors in alike]),
                np.concatenate([errors[predictor].per_plan for errors in alike]),
            )
            lines += [
                f"{LOCAL_PART}, {schedule}, {predictor}: {len(errors.per_plan)} plans; {_shares(errors)}",
                f"  plans by error in percent: {histogram(errors.per_plan)}",
            ]
    return lines
