"""KIWI's tables on our costs: Tables 1 and 2, floors and costs under limits of Figure 5, links, times of the solver.

The rows are those of the suites ``kiwi-mlp`` and ``kiwi-transformer``, with fewer limits and less time, so that all of
them run in half an hour. ``sharding`` is Alpa's problem under the limit. Each formulation begins with the plans that
those before it have within the same limit, where its problem contains them: ``kiwi_chain`` is never dearer than
``kiwi_reduced``, and neither than ``sharding``. It also begins with its own plans within smaller limits, so that no
plan is dearer within a larger one. Seconds are of each solve alone.

What the paper leaves open is swept in ``sequence_lengths``: the sequence, and the optimizer whose states count. It has
one mesh and one limit, as the others have them with the sequence and optimizer of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from formulations.solvers import DEFAULT_SOLVER
from planner.benchmarks import BenchRow, bench
from planner.benchmarks.suites import BenchInstance, Suite
from planner.models.references import ModelReference
from planner.papers.cells import Cell, Row, Table
from planner.papers.kiwi.cases import StepCase, prepared
from planner.papers.kiwi.large_steps import llama_recompute_cells, module_to_plan_cells, twenty_layers_cells
from planner.papers.kiwi.solvers import SMALLEST_PEAK
from planner.papers.kiwi.table_1 import LONG_SECONDS, own_cells, published_cells
from planner.papers.kiwi.transformer import paper_case, sweep, within
from planner.session import PlanningSession

__all__ = ["FORMULATIONS", "SHARES", "TABLES"]

FORMULATIONS = ("sharding", "checkpoint_dots", "megatron_selective", "kiwi_reduced", "kiwi_chain")
SHARES = (90, 50, 32)
"""Limits of Figure 5, in per cent of the peak of the fastest sharded plan without a limit."""

FLOORS: Mapping[tuple[str, tuple[int, ...]], tuple[int, ...]] = {
    ("encoder", (2, 4)): (48, 36, 33),
    ("encoder", (4, 2)): (68, 52, 46),
    ("decoder", (2, 4)): (46, 33),
    ("decoder", (4, 2)): (66, 47, 45),
}
"""Further limits: the least whole per cent at which sharding, checkpoint-dots and Megatron-selective have a plan, where
KIWI gains most. That of Megatron-selective for the decoder on 2x4 is 32."""

MESHES = ((2, 4), (4, 2))
SLOWDOWNS = (1, 10, 100)
PLANNED_SHARE = 60
"""Limit of the plans that are looked into under slowed links, in per cent as above."""

LAYERS = (1, 4, 8, 12, 16, 20)
TIMED_SHARES = (90, 100)
"""Layers and limits of Figure 7."""

SLOWED_SHARES = (50, 70, 90, 100)
"""Limits of Figure 6, in per cent as above."""

SEQUENCES = (512, 1024, 2048)
OPTIMIZERS = ("adamw", "sgd")
SWEPT_SHARE = 60
"""Lengths and optimizers of ``sequence_lengths``, and its limit in per cent as above."""

_PEAK_SECONDS, _SECONDS, _SWEPT_SECONDS, _TIMED_SECONDS = 12.0, 6.0, 3.0, 10.0


def _run(instance: BenchInstance, seconds: float = _SECONDS) -> tuple[BenchRow, ...]:
    limit = _PEAK_SECONDS if SMALLEST_PEAK in instance.own_solvers else seconds
    return bench(Suite("kiwi-transformer", (instance,), limit, solvers=(DEFAULT_SOLVER,)), time_limit=limit).rows


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
        for instance in sweep(case, FORMULATIONS, {*SHARES, *FLOORS[model, mesh]}, in_order=True):
            yield Cell(instance.name, partial(_planned, instance, case, model=model, mesh=shape))


def _figure_6() -> Iterator[Cell]:
    """The decoder on one node of four devices with links slowed down."""
    for slowdown in SLOWDOWNS:
        case = _slowed(slowdown)
        fixed: dict[str, Any] = {"model": "decoder", "mesh": "1x4", "slowdown": slowdown}
        for instance in _limited(case, SLOWED_SHARES):
            label = f"{instance.name}, links {slowdown} times as slow"
            yield Cell(label, partial(_planned, instance, case, **fixed))


def _limited(case: StepCase, shares: Sequence[int]) -> Iterator[BenchInstance]:
    """The formulations under limits, without their smallest peaks."""
    for instance in sweep(case, FORMULATIONS, shares, in_order=True):
        if SMALLEST_PEAK not in instance.own_solvers:
            yield instance


def _sequence_lengths() -> Iterator[Cell]:
    """The encoder on 2x4 with the sequence lengths and optimizers that the paper leaves open."""
    for sequence in SEQUENCES:
        for optimizer in OPTIMIZERS:
            case = paper_case("encoder", (2, 4), sequence=sequence, optimizer=optimizer)
            fixed: dict[str, Any] = {"model": "encoder", "mesh": "2x4", "sequence": sequence, "optimizer": optimizer}
            for instance in _limited(case, (SWEPT_SHARE,)):
                label = f"{instance.name}, sequence {sequence}, {optimizer}"
                yield Cell(label, partial(_planned, instance, case, _SWEPT_SECONDS, **fixed))


def _slowed(slowdown: int) -> StepCase:
    return paper_case("decoder", (1, 4), slowdown=slowdown)


def _planned(instance: BenchInstance, case: StepCase, seconds: float = _SECONDS, **fixed: Any) -> list[Row]:
    return _transformer_rows(_run(instance, seconds), case, **fixed)


def _looked_into(slowdown: int) -> Iterator[Row]:
    """What the plan of ``kiwi_chain`` does under slowed links."""
    case = _slowed(slowdown)
    _run(within(case, "kiwi_chain", PLANNED_SHARE, begin_with=("kiwi_reduced",)))
    ready = prepared(case)
    planned = ready.planned["kiwi_chain", ready.limit(PLANNED_SHARE, of_dynamic=False)]
    assert planned is not None, "this limit is well above the least with a plan"
    report = ready.session.replay(ready.session.schedule(planned.decision))
    yield {
        "slowdown": slowdown,
        "share": PLANNED_SHARE,
        "free_cost": ready.free.cost,
        "recomputed": report.recomputed,
        "collectives": report.collectives,
        "peak_gb": report.peak_bytes / 1e9,
    }


def _figure_7() -> Iterator[Cell]:
    """Time of the solver over layers of the encoder in primitives, on one mesh axis of eight; each solves alone."""
    for layers in LAYERS:
        case = paper_case("encoder_of_primitives", (8,), layers=layers)
        for share in TIMED_SHARES:
            for formulation in FORMULATIONS:
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


_TIMED = frozenset({"least_gb", "extra_percent", "gap_percent", "status", "seconds"})
"""The solves end by time; costs and peaks are compared within a tolerance."""

_PUBLISHED_TIMED = _TIMED | {"ratio", "claimed_gap_percent", "claimed_seconds"}

TABLES: Mapping[str, Table] = {
    "operators": Table(lambda: [Cell(f"{layers} layers", partial(_operators, layers)) for layers in LAYERS]),
    "table_1": Table(own_cells, frozenset({"seconds"})),
    "table_1_published": Table(published_cells, _PUBLISHED_TIMED),
    "table_1_published_long": Table(partial(published_cells, LONG_SECONDS), _PUBLISHED_TIMED, named_only=True),
    "figure_5_encoder": Table(partial(_figure_5, "encoder"), _TIMED),
    "figure_5_decoder": Table(partial(_figure_5, "decoder"), _TIMED),
    "figure_6": Table(_figure_6, _TIMED),
    "figure_6_plans": Table(
        lambda: [Cell(f"links {slowdown} times as slow", partial(_looked_into, slowdown)) for slowdown in SLOWDOWNS],
        frozenset({"recomputed", "collectives", "peak_gb"}),
    ),
    "sequence_lengths": Table(_sequence_lengths, _TIMED),
    "figure_7": Table(_figure_7, _TIMED),
    "twenty_layers": Table(twenty_layers_cells, _TIMED),
    "llama_recompute": Table(llama_recompute_cells, _TIMED, named_only=True),
    "llama": Table(module_to_plan_cells, _TIMED),
}
"""Tables by name."""
