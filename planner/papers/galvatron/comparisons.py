"""Tables that compare our exact searches: with Algorithm 3 on single stages, and with CP-SAT on whole pipelines."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from fractions import Fraction
from functools import partial
from math import inf
from multiprocessing import get_context

from formulations.galvatron.joint import JointResult, solve_joint
from formulations.galvatron.labels import solve_stage
from formulations.galvatron.restated import solve_joint_by_cpsat
from formulations.galvatron.slips import READINGS
from formulations.galvatron.stage import build_galvatron_stage
from formulations.problem.solution import SolveOptions, Status
from formulations.solvers import solve
from planner.papers.cells import Cell, Row
from planner.papers.galvatron import paper_tables as paper
from planner.papers.galvatron.cases import GIGABYTE, GalvatronCase
from planner.papers.galvatron.stages import algorithm_3, exact_labels, the_stage

__all__ = ["RESTATED_SECONDS", "figure_6_stage_cells", "restated_cells", "stage_cells", "stages_restated_cells"]

RESTATED_SECONDS = 10.0
"""Time limit of CP-SAT on one case, which has all of it where the case is not proven."""

LABEL_SECONDS = 30.0

STAGE_SECONDS = 10.0
"""Time limit of the portfolio on a stage."""

_RESTATED_STAGES = (("BERT-Huge-48", 12), ("T5-Large-32", 8))

STAGE_LAYERS = (8, 16, 32, 48, 64, 96, 128)
"""Layers of a stage in Figure 6."""

STAGE_GAP = 1e-4
"""Relative gap at which exact labels end there."""

_RESTATED = (
    ("BERT-Huge-48", 2, 4, (16,)),
    ("BERT-Huge-48", 4, 8, (16,)),
    ("BERT-Huge-48", 6, 16, (16,)),
    ("BERT-Huge-48", 8, 32, (16,)),
    ("T5-Large-32", 8, None, (16,)),
    ("BERT-Huge-48", 8, None, (16, 32)),
    ("Swin-Huge-48", 12, None, (32, 64)),
)
"""Model, GB of a device, blocks in place of the model's own, batches; on eight devices."""


def restated_cells() -> Iterator[Cell]:
    """One cell for every case of the joint search beside its restatement for CP-SAT."""
    for model, memory_gb, blocks, batches in _RESTATED:
        case = GalvatronCase(
            "titan-rtx-8-pcie", model, memory_gb, "galvatron_bmw", batches=batches, blocks=blocks, any_degree=True
        )
        yield Cell(str(case), partial(_restated, case))


def _restated(case: GalvatronCase) -> Iterator[Row]:
    """Seconds, quanta per sample and gap of both, to the optimum."""
    problem = case.problem()
    solve_joint(problem, Fraction(0), None, 1.0)  # tables of costs are made, and loops compiled, once for both
    row: Row = {"model": case.model, "memory_gb": case.memory_gb, "layers": problem.layers}
    row["batches"] = list(case.batches)
    for name, found, seconds in (("joint", *_joint(case)), ("cpsat", *_cpsat(case))):
        per_sample = found.quanta_per_sample
        row[f"{name}_seconds"] = seconds
        row[f"{name}_quanta"] = None if per_sample is None else float(per_sample)
        row[f"{name}_gap"] = found.gap
    yield row


def _joint(case: GalvatronCase) -> tuple[JointResult, float]:
    started = time.perf_counter()
    found = solve_joint(case.problem(), Fraction(0), None, RESTATED_SECONDS)
    return found, time.perf_counter() - started


def _cpsat(case: GalvatronCase) -> tuple[JointResult, float]:
    """In a process of its own: ortools and HiGHS do not load into one."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(_timed_cpsat, case).result()


def _timed_cpsat(case: GalvatronCase) -> tuple[JointResult, float]:
    problem = case.problem()
    solve_joint_by_cpsat(problem, 0.0)  # loads the library
    started = time.perf_counter()
    found = solve_joint_by_cpsat(problem, RESTATED_SECONDS)
    return found, time.perf_counter() - started


def stage_cells() -> Iterator[Cell]:
    """One cell for every whole model of Table II as one stage."""
    for model in paper.TABLE_2_MODELS:
        for memory_gb in paper.TABLE_2:
            yield Cell(f"{model}, {memory_gb} GB", partial(_stage, model, memory_gb))


def _stage(model: str, memory_gb: int) -> Iterator[Row]:
    """Quanta of a micro-batch by Algorithm 3 and by exact labels."""
    stage = the_stage(model, memory_gb)
    row: Row = {"model": model, "memory_gb": memory_gb}
    for name, slips in READINGS.items():
        found = algorithm_3(slips, stage, LABEL_SECONDS)
        fits = found.choices is not None and stage.is_feasible(found.choices)
        row[name] = found.cost if fits else None
    started = time.perf_counter()
    exact = exact_labels(stage, LABEL_SECONDS)
    yield row | {
        "exact": exact.cost,
        "proven": exact.cost == exact.bound,
        "exact_seconds": time.perf_counter() - started,
    }


def stages_restated_cells() -> Iterator[Cell]:
    """Whole models as one stage: the exact labels, and the portfolio on the canonical problem."""
    for model, memory_gb in _RESTATED_STAGES:
        yield Cell(f"{model}, {memory_gb} GB", partial(_stage_restated, model, memory_gb))


def _stage_restated(model: str, memory_gb: int) -> Iterator[Row]:
    stage = the_stage(model, memory_gb)
    started = time.perf_counter()
    exact = exact_labels(stage, LABEL_SECONDS)
    seconds = time.perf_counter() - started
    found = solve(build_galvatron_stage(stage), "portfolio", SolveOptions(time_limit=STAGE_SECONDS))
    yield {
        "model": model,
        "memory_gb": memory_gb,
        "exact": exact.cost,
        "exact_seconds": seconds,
        "seconds": found.seconds,
        "proven": found.status is Status.OPTIMAL,
        "gap": found.gap,
    }


def figure_6_stage_cells() -> Iterator[Cell]:
    """Figure 6 for the search of one stage alone: one cell for every number of layers."""
    for layers in STAGE_LAYERS:
        yield Cell(f"{layers} layers", partial(_layers, layers))


def _layers(layers: int) -> Iterator[Row]:
    """Least seconds of three runs, and quanta, of Algorithm 3, and of the exact labels to their gap, on BERT's layers.

    Memory grows with the layers, so that about the same share of them has to be checkpointed.
    """
    problem = GalvatronCase("titan-rtx-8-pcie", "BERT-xHuge", 20, "galvatron_bmw").problem()
    stage = problem.tables(1, 32).stage(1, 1 + layers, 1, layers * GIGABYTE // 2)
    searches = {name: partial(algorithm_3, slips, stage, LABEL_SECONDS) for name, slips in READINGS.items()}
    searches["exact"] = partial(solve_stage, stage, relative_gap=STAGE_GAP)
    for name, search in searches.items():
        found, seconds = search(), inf  # loops are compiled
        for _ in range(3):
            started = time.perf_counter()
            search()
            seconds = min(seconds, time.perf_counter() - started)
        bound = found.bound if name == "exact" else None
        yield {"search": name, "layers": layers, "quanta": found.cost, "bound": bound, "seconds": seconds}
