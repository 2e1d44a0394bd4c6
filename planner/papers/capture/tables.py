"""CAPTURE's figures with every row: Alpa's choice as the paper describes it, beside published and exact plans.

Alpa's choice is modelled, its plans are not printed. Hybrid: "autostaging ... to optimize throughput", the fastest of
all plans that fit, with complete freedom. Pipelines alone: "autolayering" cuts the model into 16 layers of equal
computation, one a stage: the plan whose slowest stage takes least. Where no plan fits, the fastest of all is shown as
out of memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from formulations.capture.canonical import least_peak_by_solver
from formulations.capture.enumeration import recommend
from formulations.capture.exact import balanced_plan, fastest_plan, fewest_gpus, least_peak_plan
from formulations.capture.problem import CapturePlan, PartitionProblem, TraceError, nodes_of
from formulations.capture.profiling import lines_as_printed, profiling_runs
from formulations.capture.sampling import PredictionErrors, prediction_errors, random_plans
from formulations.capture.slips import AS_PRINTED, AS_PUBLISHED, REPAIRED
from formulations.layers.pipeline_schedule import Schedule
from planner.papers.capture.cases import GIGABYTE, GPUS_PER_NODE, MODELS, PROFILING_GPUS, CaptureCase
from planner.papers.cells import Cell, Row, Table

__all__ = ["PLANS", "TABLES", "alpa_plan", "figure_7", "plan_rows"]

PLACEMENTS = 100_000_000
"""Of Algorithm 4 in Table II: half a minute where it does not end before, which is GPT-3-6.7B as printed alone."""

PRINTED_PLACEMENTS = 10_000_000
"""Of Algorithm 4 as printed in Figures 6 and 9: about two seconds a case."""

PLANS = 500
"""Random plans of Figure 7."""

FIGURE_7_SHARES = (0.02, 0.05, 0.11)

SETUPS = ((3, 3), (4, 2), (4, 4), (4, 4, 4, 4))
"""GPUs of every node in Figure 9: 6 in two ways, 8 and 16."""


def alpa_plan(case: CaptureCase) -> CapturePlan:
    """Alpa's choice.

    Raises
    ------
    TraceError
        No plan is possible.
    """
    if case.pipeline_only:
        return balanced_plan(case.problem, case.times)
    try:
        return fastest_plan(case.problem, case.times, case.limit)
    except TraceError:
        return fastest_plan(case.problem, case.times)


def plan_rows(case: CaptureCase) -> list[Row]:
    """Plans of Alpa, Algorithm 4 as printed, both predictors among all plans, and the exact one, by the replay."""
    problem = case.problem
    printed = recommend(case.prediction(AS_PRINTED).problem, AS_PRINTED, placement_limit=PRINTED_PLACEMENTS)
    plans = {
        "alpa": alpa_plan(case),
        **({} if printed.plan is None else {"printed": printed.plan}),
        "published": least_peak_plan(case.prediction(AS_PUBLISHED).problem, AS_PUBLISHED),
        "repaired": least_peak_plan(case.prediction(REPAIRED).problem),
        "exact": least_peak_plan(problem),
    }
    return [
        {
            "model": case.model,
            "batch": case.batch,
            "schedule": str(case.schedule),
            "gpus": "+".join(map(str, case.nodes)),
            "kind": "pipeline" if case.pipeline_only else "hybrid",
            "solver": solver,
            "complete": solver != "printed" or printed.complete,
            "peak_gb": problem.peak(plan) / GIGABYTE,
            "total_gb": sum(problem.gpu_peaks(plan)) / GIGABYTE,
            "fits": problem.peak(plan) <= case.limit,
            "rate": case.batch / case.times.seconds(problem, plan),
            "plan": problem.words(plan),
        }
        for solver, plan in plans.items()
    ]


def _lines() -> Iterator[Row]:
    """Lines of Description 1 as printed, for 64 layers on 16 GPUs."""
    for line, sizes in lines_as_printed(64, 16).items():
        yield {"line": line, "layers": sum(sizes), "stages": list(sizes)}


def _runs() -> Iterator[Row]:
    """Profiling runs of 16 layers in four stages: layers that one measures alone, and added to their predecessors."""
    runs = profiling_runs(16, 4)
    for run, partition in enumerate(runs.partitions):
        yield {
            "stages": list(partition),
            "alone": [layer for layer, (number, _) in enumerate(runs.alone) if number == run],
            "added": [layer for layer, ((number, _), _) in enumerate(runs.added, start=1) if number == run],
        }


def _degrees() -> Iterator[Row]:
    """GB of a stage of eight layers over the degree of data parallelism: by both laws, and by the replay."""
    case = CaptureCase("GPT-3-6.7B", 1024, Schedule.GPIPE, (16,))
    problems = {"logarithm": case.prediction(AS_PUBLISHED).problem, "division": case.prediction(REPAIRED).problem}
    problems["replay"] = case.problem
    for number, configuration in enumerate(case.configurations):
        if configuration.sample_parts == configuration.devices:
            peaks = {f"{name}_gb": problem.peaks[-1, number, 8, 16] / GIGABYTE for name, problem in problems.items()}
            yield {"degree": configuration.devices, **peaks}


def _figure_6(kind: str) -> Iterator[Cell]:
    for schedule in (Schedule.ONE_F_ONE_B, Schedule.GPIPE):
        for model, (batches, _) in MODELS.items():
            for batch in batches:
                case = CaptureCase(model, batch, schedule, pipeline_only=kind == "pipeline")
                yield Cell(str(case), partial(plan_rows, case))


def figure_7(schedule: Schedule, plans: int = PLANS, seed: int = 0) -> dict[str, PredictionErrors]:
    """Errors of both predictors on random plans of Wide-ResNet 1B that are predicted to fit (Figure 7).

    Parameters
    ----------
    schedule
        Of the micro-batches; GPipe in the paper.
    plans, seed
        Number of plans, and seed of their random numbers.
    """
    case = CaptureCase("Wide-ResNet-1B", 768, schedule)
    predicted = {"published": case.prediction(AS_PUBLISHED).problem, "repaired": case.prediction(REPAIRED).problem}
    drawn = random_plans(case.problem, plans, seed, lambda plan: predicted["published"].peak(plan) <= case.limit)
    held = [case.problem.gpu_peaks(plan) for plan in drawn]
    return {
        name: prediction_errors([problem.gpu_peaks(plan) for plan in drawn], held)
        for name, problem in predicted.items()
    }


def _figure_7() -> Iterator[Cell]:
    for schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B):
        yield Cell(str(schedule), partial(_errors, schedule))


def _errors(schedule: Schedule) -> Iterator[Row]:
    for predictor, errors in figure_7(schedule).items():
        row: Row = {"schedule": str(schedule), "predictor": predictor}
        for share in FIGURE_7_SHARES:
            per_gpu, per_plan = errors.within(share)
            row[f"gpu_within_{round(100 * share)}"] = 100 * per_gpu
            row[f"plan_within_{round(100 * share)}"] = 100 * per_plan
        yield row


def _figure_9() -> Iterator[Cell]:
    for nodes in SETUPS:
        case = CaptureCase("Wide-ResNet-1B", 768, Schedule.GPIPE, nodes)
        yield Cell(str(case), partial(plan_rows, case))


def _fewest() -> Iterator[Cell]:
    for schedule in (Schedule.ONE_F_ONE_B, Schedule.GPIPE):
        for model in MODELS:
            yield Cell(f"{model}, {schedule}", partial(_gpus, model, schedule))


def _gpus(model: str, schedule: Schedule) -> Iterator[Row]:
    """The fewest GPUs on which a model fits."""
    batch = MODELS[model][0][0]

    def problem_of(gpus: int) -> Any:
        return CaptureCase(model, batch, schedule, nodes_of(gpus, GPUS_PER_NODE)).problem

    try:
        found = fewest_gpus(problem_of, CaptureCase(model, batch, schedule).limit, PROFILING_GPUS)
        gpus, peak = sum(found.problem.nodes), found.problem.peak(found.plan) / GIGABYTE
    except TraceError:
        gpus, peak = None, None
    yield {"model": model, "schedule": str(schedule), "gpus": gpus, "peak_gb": peak}


def _table_2() -> Iterator[Cell]:
    for model in ("GPT-3-6.7B", "MoE-7.1B", "Wide-ResNet-2B"):
        for merge_to in (None, 16):
            case = CaptureCase(model, MODELS[model][0][0], Schedule.ONE_F_ONE_B, merge_to=merge_to)
            yield Cell(str(case), partial(_planning, case))


def _planning(case: CaptureCase) -> Iterator[Row]:
    """Profiling runs and simulated seconds of them, and seconds of planning, with all layers and merged to 16.

    Algorithm 4 runs as the text has it and as it is printed, each until a number of placements that the row names.

    A profiling run lasts for two iterations, as in the paper; its seconds are those of a step of the fastest plan, once
    more for compilation that the replay does not have. So only ratios compare with the paper's hours.
    """
    step = case.times.seconds(case.problem, fastest_plan(case.problem, case.times))
    prediction = case.prediction(AS_PUBLISHED)
    planning: Row = {"placement_limit": PLACEMENTS}
    for prefix, slips in (("", AS_PUBLISHED), ("printed_", AS_PRINTED)):
        started = time.perf_counter()
        found = recommend(prediction.problem, slips, placement_limit=PLACEMENTS)
        planning[f"{prefix}planning_seconds"] = time.perf_counter() - started
        planning[f"{prefix}placements"] = found.placements
        planning[f"{prefix}complete"] = found.complete
    started = time.perf_counter()
    least_peak_plan(case.problem)
    yield {
        "model": case.model,
        "layers": case.problem.layers,
        "runs": case.profile.runs,
        "profiling_seconds": 2 * step * case.profile.runs,
        "exact_seconds": time.perf_counter() - started,
    } | planning


def _restated() -> Iterator[Cell]:
    for model in ("GPT-3-6.7B", "MoE-7.1B", "Wide-ResNet-2B"):
        for schedule in (Schedule.ONE_F_ONE_B, Schedule.GPIPE):
            case = CaptureCase(model, MODELS[model][0][0], schedule)
            yield Cell(str(case), partial(_both_times, case))


def _both_times(case: CaptureCase) -> Iterator[Row]:
    """Seconds of the exact program, and of the canonical problem in a bisection of its limit, for one least peak."""
    row: Row = {"model": case.model, "schedule": str(case.schedule), "layers": case.problem.layers}
    searches: Mapping[str, Callable[[PartitionProblem], CapturePlan | None]] = {
        "exact": least_peak_plan,
        "canonical": least_peak_by_solver,
    }
    for name, search in searches.items():
        search(case.problem)  # loops are compiled
        started = time.perf_counter()
        plan = search(case.problem)
        row[f"{name}_seconds"] = time.perf_counter() - started
        row[f"{name}_peak_gb"] = None if plan is None else case.problem.peak(plan) / GIGABYTE
    yield row


TABLES: Mapping[str, Table] = {
    "description_1": Table(lambda: [Cell("lines", _lines)]),
    "profiling_runs": Table(lambda: [Cell("runs", _runs)]),
    "degrees": Table(lambda: [Cell("stage", _degrees)]),
    "figure_6_hybrid": Table(partial(_figure_6, "hybrid")),
    "figure_6_pipeline": Table(partial(_figure_6, "pipeline")),
    "figure_7": Table(_figure_7),
    "figure_9": Table(_figure_9),
    "fewest": Table(_fewest),
    "restated": Table(_restated, frozenset({"exact_seconds", "canonical_seconds"})),
    "table_2": Table(_table_2, frozenset({"planning_seconds", "printed_planning_seconds", "exact_seconds"})),
}
"""Tables by name; Figure 8 is in the rates of ``figure_6_hybrid``."""
