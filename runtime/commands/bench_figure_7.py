"""The part ``figure-7-local`` of the suite ``capture``: Figure 7 of its paper on small models that really run here.

Two small language models run as pipelines of four local processes; :class:`LocalCase` also takes data and tensor
parallelism within stages, which costs more time. The predictor is profiled on such runs and predicts random ones, all
different, which then run.

An instance is a model with a schedule, a solver is a predictor: ``published`` and ``repaired`` CAPTURE's, ``engine``
our formula of the memory of torch's engine, which needs no profiling runs. The objective is the mean error of the
predicted peak of a plan's fullest GPU, in millionths of the measured peak. The histograms of errors are in the
messages, and for all models together in the last lines.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from math import comb
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from formulations.capture.predictor import FloatArray
from formulations.capture.sampling import PredictionErrors
from formulations.galvatron.costs import CostModel
from formulations.layers.pipeline_schedule import Schedule
from formulations.problem.solution import SolveOptions, SolveResult, Status
from formulations.solvers import SolverPool
from formulations.solvers.processes.worker_process import read_status_bytes
from planner.benchmarks import BenchInstance, BenchRow, Suite, SuiteError
from planner.benchmarks.suites import OwnSolver, ReportProgress, check_names
from planner.layers.profiles.folding import model_layers
from planner.machine.cluster import load_cluster
from planner.models.references import ModelReference
from planner.papers.capture.bench import ERROR_SHARES, PARTS, capture_suite
from planner.papers.galvatron.adapter import device_links
from runtime.figure_7.errors import LocalPlans, errors_of_predictions
from runtime.figure_7.runs import LocalRuns, measured_by
from runtime.job.rank_pool import RankPool

__all__ = ["LOCAL_PART", "LocalCase", "MeasuredErrors", "capture_suite_with_runs", "measured_errors"]

LOCAL_PART = "figure-7-local"
PLANS = 500
"""As in the paper."""

PREDICTORS = ("published", "repaired", "engine")
SCHEDULES = (Schedule.GPIPE, Schedule.ONE_F_ONE_B)

_CONFIGURATIONS = {
    "gpt2": {
        "model_type": "gpt2", "n_embd": 64, "n_head": 4, "vocab_size": 64, "n_positions": 64, "bos_token_id": 0,
        "eos_token_id": 0, "tie_word_embeddings": False,
    },
    "llama": {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 192, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 64, "max_position_embeddings": 64, "pad_token_id": 63,
    },
}  # fmt: skip
MODELS = tuple(_CONFIGURATIONS)
"""Small models of these families; embedding and head are not tied, so that any stages may have them."""

_SEQUENCE, _FOLDED_BATCH = 64, 8
_CLUSTER = "titan-rtx-8-pcie"
"""Of which only the bytes of layers are taken, which are the same on all."""


@dataclass(frozen=True)
class LocalCase:
    """Model, devices and micro-batches of one set of pipelines that run locally.

    Parameters
    ----------
    model
        One of :data:`MODELS`.
    schedule
        Order of the micro-batches in a stage: GPipe or 1F1B.
    blocks
        Number of blocks. The embedding and the head are layers too. Profiling needs twice as many layers as devices.
    devices, degrees
        Number of local processes, and the possible numbers of devices of a stage.
    micro_batches, micro_batch
        Number of micro-batches, and samples in each.
    """

    model: str
    schedule: Schedule
    blocks: int = 12
    devices: int = 4
    degrees: tuple[int, ...] = (1,)
    micro_batches: int = 4
    micro_batch: int = 8

    def __str__(self) -> str:
        """Name of its instance."""
        return f"{LOCAL_PART}-{self.model}-{self.schedule}-{self.devices}"


@dataclass(frozen=True, eq=False)
class MeasuredErrors:
    """Errors of the predictors over the runs of a case.

    Parameters
    ----------
    by_predictor
        Errors of each of :data:`PREDICTORS`.
    profiling_runs
        Number of these runs.
    seconds
        Wall time of these and of the plans' runs.
    """

    by_predictor: Mapping[str, PredictionErrors]
    profiling_runs: int
    seconds: float


@cache
def measured_errors(case: LocalCase, plans: int, seed: int) -> MeasuredErrors:
    """Profile a model on local processes, run different random plans, and compare.

    Parameters
    ----------
    case
        Which.
    plans, seed
        Number of plans, and seed of their random numbers.

    Raises
    ------
    TraceError, LaunchError, PlanError
        There are too few layers, devices or plans, or something cannot be run.
    """
    cluster = load_cluster(_CLUSTER)
    with TemporaryDirectory(prefix="meshwright-figure-7-") as folder, RankPool(case.devices) as pool:
        began = time.perf_counter()
        configuration = Path(folder) / "config.json"
        configuration.write_text(json.dumps(_CONFIGURATIONS[case.model]), encoding="utf-8")
        reference = ModelReference(
            f"hf:{configuration}", batch=_FOLDED_BATCH, sequence=_SEQUENCE, layers=case.blocks, dropout=0.0
        )
        chain = model_layers(reference, cluster)
        runs = LocalRuns(
            chain=chain,
            borders=tuple(range(len(chain) + 1)),
            schedule=case.schedule,
            micro_batches=case.micro_batches,
            reference=reference,
            measure=measured_by(pool),
        )
        drawn = LocalPlans(
            runs=runs,
            costs=CostModel(device_links(cluster)),
            devices=case.devices,
            degrees=case.degrees,
            micro_batch=case.micro_batch,
        )
        profile = drawn.profile()
        errors = errors_of_predictions(drawn, profile, plans, seed)
        return MeasuredErrors(errors, profile.runs, time.perf_counter() - began)


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
