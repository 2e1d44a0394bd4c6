"""OSDP's searches as tables: what they lose, what FSDP leaves to gain, and second opinions on the exact plans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np

from formulations.osdp.knapsack import Knapsack, KnapsackClass
from formulations.osdp.problem import SECONDS_PER_COST, build_osdp, operator_tables
from formulations.osdp.scheduler import Method
from formulations.problem.solution import SolveOptions, Status
from formulations.solvers import solve
from planner.papers.cells import Cell, Row
from planner.papers.osdp.cases import CLUSTERS, LIMITS_GIB, MODELS, OsdpCase, exact_plan

__all__ = [
    "LOSSES_TIMED",
    "OPINIONS_TIMED",
    "PROFILED_BYTES",
    "PROFILED_SECONDS",
    "ended",
    "loss_cells",
    "opinion_cells",
    "profile_rows",
    "room_cells",
]

LOSSES_TIMED = frozenset({"lost", "proven", "seconds", "exact_seconds"})
OPINIONS_TIMED = frozenset({"seconds", "highs_seconds", "highs_status", "same_cost"})

DEPTH_FIRST = (Method.DFS, Method.DFS_SHARDED_FIRST, Method.DFS_GROUPED, Method.DFS_LOOK_AHEAD)

SEARCHED = ("osdp_base", "osdp")
"""Formulations on which the paper's search runs too: it cannot count the peak."""

LOSS_SECONDS = 1.0
"""Time limit of each depth-first search; tables ``search_limits`` and ``search_limits_long`` have longer ones."""

_OPINION_SECONDS = 10.0

PROFILED_BYTES = {
    "as profiled": (377.7e6, 271.9e6, 147.3e6, 116.2e6),
    "by equation (1)": (377.7e6, 290.5e6, 203.4e6, 116.2e6),
}
"""A layer of hidden size 1536 with one unit of the batch: all DP, one third ZDP, two thirds, all ZDP. From the profile
in the authors' repository, and with the bytes that equation (1) gives the same layer."""

PROFILED_SECONDS = (51.7e-3, 54.9e-3, 60.7e-3, 69.8e-3)
"""Of the same, from the same profile."""

_PROFILED_LAYERS, _PROFILED_CAPACITY = 48, 8192e6 - 800e6
"""The printed run's layers, and bytes; the authors' script sets 800 MB aside."""


def _cases(formulations: tuple[str, ...], clusters: tuple[str, ...]) -> Iterator[OsdpCase]:
    for cluster in clusters:
        for gibibytes in LIMITS_GIB:
            for model in MODELS:
                for formulation in formulations:
                    yield OsdpCase(model, cluster, gibibytes, formulation)


def ended(row: Mapping[str, Any]) -> bool:
    """Whether the search of a row of ``search_limits`` ended by itself: with the best plan, or because nothing fits."""
    return bool(row["seconds"] < row["limit_seconds"])


def loss_cells() -> Iterator[Cell]:
    """Every problem of equation (1) by every depth-first search."""
    for case in _cases(SEARCHED, tuple(CLUSTERS.values())):
        yield Cell(case.name, partial(_losses, case))


def _losses(case: OsdpCase) -> Iterator[Row]:
    """Extra time per sample of each search, as a share of the exact plan's; no rows where nothing fits."""
    exact = exact_plan(case)
    if exact.objective is None:
        return
    for method in DEPTH_FIRST:
        found = case.plan(method, LOSS_SECONDS)
        yield {
            "cluster": case.cluster,
            "memory_gib": case.gibibytes,
            "model": case.model,
            "formulation": case.formulation,
            "search": str(method),
            "lost": None if found.objective is None else found.objective / exact.objective - 1,
            "proven": found.gap == 0,
            "seconds": found.seconds,
            "exact_proven": exact.status is Status.OPTIMAL,
            "exact_seconds": exact.seconds,
        }


def room_cells() -> Iterator[Cell]:
    """What FSDP leaves on 8 TITAN RTX, with a batch that grows by samples and by the authors' units."""
    for case in _cases(("osdp", "osdp_units"), (CLUSTERS["titan"],)):
        yield Cell(case.name, partial(_room, case))


def _room(case: OsdpCase) -> Iterator[Row]:
    """What FSDP leaves at its best batch, what that allows, and what the exact plan, its batch included, gains."""
    fsdp, exact = case.plan(Method.SHARDED), exact_plan(case)
    if fsdp.objective is None or exact.objective is None:
        return
    machine = case.machine()
    tables = operator_tables(case.chain(), machine, case.settings)
    replicated = sum(int(table.fixed_resident[0] - table.fixed_resident[1]) for table in tables)
    left = machine.memory_bytes - fsdp.memory_bytes
    computing = sum(table.computation(fsdp.batch) for table in tables) * SECONDS_PER_COST / fsdp.step_seconds
    part, communicating = min(1.0, left / replicated), 1 - computing
    yield {
        "formulation": case.formulation,
        "memory_gib": case.gibibytes,
        "model": case.model,
        "batch": fsdp.batch,
        "left_bytes": left,
        "part": part,
        "communicating": communicating,
        "possible": 1 / (1 - communicating * part / 3) - 1,
        "gained": fsdp.objective / exact.objective - 1,
    }


def profile_rows() -> Iterator[Row]:
    """What the exact solution of the authors' own profile gains over FSDP."""
    for label, held in PROFILED_BYTES.items():
        cost = np.round(1e9 * np.array(PROFILED_SECONDS)).astype(np.int64)
        layer = KnapsackClass(
            np.round(np.array(held)).astype(np.int64), cost, np.ones(4, dtype=np.bool_), _PROFILED_LAYERS
        )
        best = Knapsack([layer]).solve(round(_PROFILED_CAPACITY))
        assert best is not None, "all layers sharded fit"
        yield {"bytes": label, "gained": _PROFILED_LAYERS * int(cost[-1]) / best.cost - 1}


def opinion_cells() -> Iterator[Cell]:
    """HiGHS on the canonical problem at the exact plan's batch, one model of each family."""
    for model in {model.partition("-")[0]: model for model in MODELS}.values():
        for formulation in ("osdp", "osdp_peak"):
            case = OsdpCase(model, CLUSTERS["titan"], max(LIMITS_GIB), formulation)
            yield Cell(case.name, partial(_opinion, case))


def _opinion(case: OsdpCase) -> Iterator[Row]:
    plan = exact_plan(case)
    if not plan.modes:
        return
    problem = build_osdp(case.chain(), case.machine(), case.settings, plan.batch)
    result = solve(problem, "highs", SolveOptions(time_limit=_OPINION_SECONDS))
    ours = next(each.cost for each in plan.candidates if each.batch == plan.batch)
    yield {
        "model": case.model,
        "formulation": case.formulation,
        "batches": len(plan.candidates),
        "status": str(plan.status),
        "seconds": plan.seconds,
        "highs_status": str(result.status),
        "highs_seconds": result.seconds,
        "same_cost": result.objective == ours,
    }
