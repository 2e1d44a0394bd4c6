"""Cells of steps beyond the paper: Llama with recomputation and offload, from module to plan, and a deep encoder.

The rows are those of the parts ``recompute``, ``llama`` and ``layers`` of the suite ``kiwi-transformer``.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from formulations.solvers import DEFAULT_SOLVER
from planner.benchmarks import BenchRow, bench
from planner.benchmarks.suites import BenchInstance, Suite
from planner.papers.cells import Cell, Row
from planner.papers.kiwi.cases import StepCase, prepared
from planner.papers.kiwi.solvers import plan_from_module
from planner.papers.kiwi.transformer import (
    DYNAMIC_SHARES,
    LAYER_SHARES,
    LLAMA_MEMORY,
    LLAMA_SECONDS,
    LOSS_CHUNKS,
    llama_case,
    paper_case,
    within,
)

__all__ = ["llama_recompute_cells", "module_to_plan_cells", "twenty_layers_cells"]

_SECONDS = 5.0


def llama_recompute_cells() -> Iterator[Cell]:
    """Llama with 32 layers on one device: recomputation alone, and with offload, within shares of dynamic memory."""
    case = llama_case(32, (1,), loss_chunks=LOSS_CHUNKS)
    for share in DYNAMIC_SHARES:
        for formulation in ("kiwi_chain", "kiwi_offload"):
            instance = within(case, formulation, share, of_dynamic=True, seconds=_SECONDS)
            # Limits of this instance are those of the case whose gradients take no memory.
            yield Cell(instance.name, partial(_within, instance, case.without_gradients(), share, of_dynamic=True))


def twenty_layers_cells() -> Iterator[Cell]:
    """The encoder in primitives with 20 layers on one axis of eight."""
    case = paper_case("encoder_of_primitives", (8,), layers=20)
    for share in LAYER_SHARES:
        instance = within(case, "kiwi_chain", share, seconds=_SECONDS)
        yield Cell(instance.name, partial(_within, instance, case, share, of_dynamic=False))


def module_to_plan_cells() -> Iterator[Cell]:
    """Llama with 4 and 32 layers on 2x4, with tracing, scheduling and replay."""
    for layers, memory in LLAMA_MEMORY.items():
        case = llama_case(layers, (2, 4))
        own = {DEFAULT_SOLVER: partial(plan_from_module, case, "kiwi_chain", memory, DEFAULT_SOLVER)}
        instance = BenchInstance(case.name, "kiwi_chain", None, own_solvers=own, time_limit=LLAMA_SECONDS)
        yield Cell(instance.name, partial(_from_module, instance, layers, memory))


def _within(instance: BenchInstance, case: StepCase, share: int, *, of_dynamic: bool) -> Iterator[Row]:
    row = _solved(instance)
    ready = prepared(case)
    yield {
        "formulation": row.formulation,
        "share": share,
        "limit_gb": ready.limit(share, of_dynamic) / 1e9,
        "extra_percent": None if row.objective is None else 100 * (row.objective / ready.free.cost - 1),
        **_found(row),
    }


def _from_module(instance: BenchInstance, layers: int, memory: int) -> Iterator[Row]:
    yield {"layers": layers, "mesh": "2x4", "limit_gb": memory / 1e9, **_found(_solved(instance))}


def _solved(instance: BenchInstance) -> BenchRow:
    (row,) = bench(Suite("kiwi-transformer", (instance,), solvers=(DEFAULT_SOLVER,))).rows
    return row


def _found(row: BenchRow) -> Row:
    return {
        "cost": row.objective,
        "gap_percent": None if row.gap is None else 100 * row.gap,
        "status": str(row.status),
        "seconds": row.seconds,
    }
