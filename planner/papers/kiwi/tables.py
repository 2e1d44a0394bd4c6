"""KIWI's tables on our costs: Tables 1 and 2, floors and costs under limits of Figure 5, links, times of the solver.

The rows are those of the suites ``kiwi-mlp`` and ``kiwi-transformer``, with fewer limits and less time, so that all of
them run in half an hour. ``sharding`` is Alpa's problem under the limit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from formulations.problem.solution import SolveOptions
from formulations.solvers import DEFAULT_SOLVER
from planner.benchmarks import BenchRow, bench
from planner.benchmarks.suites import BenchInstance, Suite
from planner.models.references import ModelReference
from planner.papers.cells import Cell, Row, Table
from planner.papers.kiwi.cases import StepCase, prepared
from planner.papers.kiwi.mlp import PUBLISHED_FORMULATIONS, kiwi_mlp_suite
from planner.papers.kiwi.solvers import SMALLEST_PEAK
from planner.papers.kiwi.transformer import paper_case, sweep, within
from planner.session import PlanningSession

__all__ = ["FORMULATIONS", "SHARES", "TABLES"]

FORMULATIONS = ("sharding", "checkpoint_dots", "megatron_selective", "kiwi_reduced", "kiwi_chain")
SHARES = (90, 50, 32)
"""Limits in per cent of the peak of the fastest sharded plan without a limit."""

MESHES = ((2, 4), (4, 2))
SLOWDOWNS = (1, 10, 100)
SLOWED_SHARE = 60
"""Limit of the plans that are looked into under slowed links, in per cent as above."""

LAYERS = (1, 4, 8, 12, 16, 20)
TIMED_SHARES = (90, 100)
"""Layers and limits of Figure 7."""

_MLP_SECONDS, _PEAK_SECONDS, _SECONDS, _TIMED_SECONDS = 60.0, 12.0, 6.0, 10.0


def _table_1() -> Iterator[Cell]:
    """The full problem as the solver ``staged``; the others as canonical problems by the portfolio."""
    suite = kiwi_mlp_suite()
    for each in suite.instances:
        if each.formulation not in PUBLISHED_FORMULATIONS:
            own = each.own_solvers if each.formulation == "kiwi_full" else {}
            yield Cell(each.name, partial(_solved, replace(suite, instances=(replace(each, own_solvers=own),))))


def _solved(suite: Suite) -> Iterator[Row]:
    """One instance of the MLP."""
    cost = _unlimited_cost(suite)
    for row in bench(suite, [DEFAULT_SOLVER], time_limit=_MLP_SECONDS).rows:
        yield {
            "share": int(row.instance.rpartition("%")[0].rpartition("-")[2]),
            "formulation": row.formulation,
            "ratio": None if row.objective is None else row.objective / cost,
            "seconds": row.seconds,
            "status": str(row.status),
        }


def _unlimited_cost(suite: Suite) -> int:
    """Cost of the best plan without a limit, from the suite's note on it."""
    return int(suite.notes[1].partition("costs ")[2].partition(" ")[0].replace(",", ""))


def _run(instances: Sequence[BenchInstance]) -> tuple[BenchRow, ...]:
    timed = tuple(
        replace(each, time_limit=_PEAK_SECONDS if SMALLEST_PEAK in each.own_solvers else _SECONDS) for each in instances
    )
    return bench(Suite("kiwi-transformer", timed, _SECONDS, solvers=(DEFAULT_SOLVER,))).rows


def _transformer_rows(rows: Sequence[BenchRow], case: StepCase, **fixed: Any) -> list[Row]:
    found: list[Row] = []
    ready = prepared(case)
    for row in rows:
        is_peak = row.solver == SMALLEST_PEAK
        share = None if is_peak else int(row.instance.partition("%")[0].rpartition("-")[2])
        cost = None if is_peak else row.objective
        found.append(
            fixed
            | {
                "formulation": row.formulation,
                "share": share,
                "limit_gb": None if share is None else ready.limit(share, of_dynamic=False) / 1e9,
                "peak_gb": row.objective / 1e9 if is_peak and row.objective is not None else None,
                "least_gb": row.bound / 1e9 if is_peak and row.bound is not None else None,
                "cost": cost,
                "extra_percent": None if cost is None else 100 * (cost / ready.free.cost - 1),
                "gap_percent": None if is_peak or row.gap is None else 100 * row.gap,
                "status": str(row.status),
                "seconds": row.seconds,
            }
        )
    return found


def _figure_5(model: str) -> Iterator[Cell]:
    for mesh in MESHES:
        shape = "x".join(map(str, mesh))
        case = paper_case(model, mesh)
        for instance in sweep(case, FORMULATIONS, SHARES):
            yield Cell(instance.name, partial(_planned, instance, case, model=model, mesh=shape))


def _figure_6() -> Iterator[Cell]:
    """The decoder on one node of four devices with links slowed down, at half of the memory."""
    for slowdown in SLOWDOWNS:
        case = _slowed(slowdown)
        for instance in sweep(case, FORMULATIONS, (50,)):
            if SMALLEST_PEAK not in instance.own_solvers:
                fixed = {"model": "decoder", "mesh": "1x4", "slowdown": slowdown}
                label = f"{instance.name}, links {slowdown} times as slow"
                yield Cell(label, partial(_planned, instance, case, **fixed))


def _slowed(slowdown: int) -> StepCase:
    return paper_case("decoder", (1, 4), slowdown=slowdown)


def _planned(instance: BenchInstance, case: StepCase, **fixed: Any) -> list[Row]:
    return _transformer_rows(_run([instance]), case, **fixed)


def _looked_into(slowdown: int) -> Iterator[Row]:
    """What the plan of ``kiwi_chain`` does under slowed links."""
    ready = prepared(_slowed(slowdown))
    limit = ready.limit(SLOWED_SHARE, of_dynamic=False)
    decision = ready.session.solve(ready.request("kiwi_chain", limit, DEFAULT_SOLVER, SolveOptions(_SECONDS))).decision
    report = ready.session.replay(ready.session.schedule(decision))
    yield {
        "slowdown": slowdown,
        "share": SLOWED_SHARE,
        "free_cost": ready.free.cost,
        "recomputed": report.recomputed,
        "collectives": report.collectives,
        "peak_gb": report.peak_bytes / 1e9,
    }


def _figure_7() -> Iterator[Cell]:
    """Time of the solver over layers of the encoder in primitives, on one mesh axis of eight."""
    for layers in LAYERS:
        case = paper_case("encoder_of_primitives", (8,), layers=layers)
        for share in TIMED_SHARES:
            for formulation in ("sharding", "kiwi_chain"):
                instance = within(case, formulation, share, seconds=_TIMED_SECONDS)
                yield Cell(instance.name, partial(_timed, instance, layers))


def _timed(instance: BenchInstance, layers: int) -> Iterator[Row]:
    share = int(instance.name.partition("%")[0].rpartition("-")[2])
    for row in bench(Suite("kiwi-transformer", (instance,), _TIMED_SECONDS, solvers=(DEFAULT_SOLVER,))).rows:
        yield {
            "layers": layers,
            "formulation": row.formulation,
            "share": share,
            "gap_percent": None if row.gap is None else 100 * row.gap,
            "status": str(row.status),
            "seconds": row.seconds,
        }


def _operators(layers: int) -> Iterator[Row]:
    """Operators of the encoder's traced step, in primitives; the paper counts those of XLA's HLO."""
    reference = ModelReference(
        "planner.papers.kiwi.models:encoder_of_primitives", batch=16, sequence=1024, layers=layers
    )
    session = PlanningSession(reference, paper_case("encoder", (2, 4)).spec(), (2, 4), "adamw")
    yield {"layers": layers, "operators": len(session.graph.operators)}


_TIMED = frozenset({"least_gb", "gap_percent", "status", "seconds"})
"""The solves end by time."""

TABLES: Mapping[str, Table] = {
    "operators": Table(lambda: [Cell(f"{layers} layers", partial(_operators, layers)) for layers in LAYERS]),
    "table_1": Table(_table_1, frozenset({"seconds"})),
    "figure_5_encoder": Table(partial(_figure_5, "encoder"), _TIMED),
    "figure_5_decoder": Table(partial(_figure_5, "decoder"), _TIMED),
    "figure_6": Table(_figure_6, _TIMED),
    "figure_6_plans": Table(
        lambda: [Cell(f"links {slowdown} times as slow", partial(_looked_into, slowdown)) for slowdown in SLOWDOWNS],
        frozenset({"recomputed", "collectives", "peak_gb"}),
    ),
    "figure_7": Table(_figure_7, _TIMED),
}
"""Tables by name."""
