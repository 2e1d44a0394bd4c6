"""KIWI's tables on our costs: solver times of Table 1, floors and costs under limits of Figure 5, links of Figure 6.

The rows are those of the suites ``kiwi-mlp`` and ``kiwi-transformer``, with fewer limits and less time, so that all of
them run in a quarter of an hour. ``sharding`` is Alpa's problem under the limit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from formulations.solvers import DEFAULT_SOLVER
from planner.benchmarks import BenchRow, Observer, bench
from planner.benchmarks.suites import BenchInstance, Suite
from planner.models.references import ModelReference
from planner.papers.kiwi.mlp import PUBLISHED_FORMULATIONS, kiwi_mlp_suite
from planner.papers.kiwi.solvers import SMALLEST_PEAK
from planner.papers.kiwi.transformer import paper_case, sweep
from planner.session import PlanningSession

__all__ = ["FORMULATIONS", "SHARES", "TABLES"]

Row = dict[str, Any]
Report = Callable[[str], None]

FORMULATIONS = ("sharding", "checkpoint_dots", "megatron_selective", "kiwi_reduced", "kiwi_chain")
SHARES = (90, 50, 32)
"""Limits in per cent of the peak of the fastest sharded plan without a limit."""

MESHES = ((2, 4), (4, 2))
SLOWDOWNS = (1, 10, 100)
OPERATOR_LAYERS = (1, 4)

_MLP_SECONDS, _PEAK_SECONDS, _SECONDS = 60.0, 12.0, 6.0


class _Reporting(Observer):
    """Passes on what begins."""

    def __init__(self, report: Report) -> None:
        self._report = report

    def begins(self, instance: str, solver: str) -> None:
        """Report the instance and its solver."""
        self._report(f"{instance}, {solver}")


def _table_1(report: Report) -> list[Row]:
    """The full problem as the solver ``staged``; the others as canonical problems by the portfolio."""
    suite = kiwi_mlp_suite()
    instances = tuple(
        replace(each, own_solvers=each.own_solvers if each.formulation == "kiwi_full" else {})
        for each in suite.instances
        if each.formulation not in PUBLISHED_FORMULATIONS
    )
    rows = bench(
        replace(suite, instances=instances), [DEFAULT_SOLVER], time_limit=_MLP_SECONDS, observer=_Reporting(report)
    ).rows
    cost = _unlimited_cost(suite)
    return [
        {
            "share": int(row.instance.rpartition("%")[0].rpartition("-")[2]),
            "formulation": row.formulation,
            "ratio": None if row.objective is None else row.objective / cost,
            "seconds": row.seconds,
            "status": str(row.status),
        }
        for row in rows
    ]


def _unlimited_cost(suite: Suite) -> int:
    """Cost of the best plan without a limit, from the suite's note on it."""
    return int(suite.notes[1].partition("costs ")[2].partition(" ")[0].replace(",", ""))


def _run(instances: Sequence[BenchInstance], report: Report) -> tuple[BenchRow, ...]:
    timed = tuple(
        replace(each, time_limit=_PEAK_SECONDS if SMALLEST_PEAK in each.own_solvers else _SECONDS) for each in instances
    )
    return bench(
        Suite("kiwi-transformer", timed, _SECONDS, solvers=(DEFAULT_SOLVER,)), observer=_Reporting(report)
    ).rows


def _transformer_rows(rows: Sequence[BenchRow], **fixed: Any) -> list[Row]:
    found: list[Row] = []
    for row in rows:
        is_peak = row.solver == SMALLEST_PEAK
        share = None if is_peak else int(row.instance.partition("%")[0].rpartition("-")[2])
        found.append(
            fixed
            | {
                "formulation": row.formulation,
                "share": share,
                "peak_gb": row.objective / 1e9 if is_peak and row.objective is not None else None,
                "least_gb": row.bound / 1e9 if is_peak and row.bound is not None else None,
                "cost": None if is_peak else row.objective,
                "status": str(row.status),
                "seconds": row.seconds,
            }
        )
    return found


def _figure_5(model: str, report: Report) -> list[Row]:
    rows = []
    for mesh in MESHES:
        instances = sweep(paper_case(model, mesh), FORMULATIONS, SHARES)
        rows += _transformer_rows(_run(instances, report), model=model, mesh="x".join(map(str, mesh)))
    return rows


def _figure_6(report: Report) -> list[Row]:
    """The decoder on one node of four devices with links slowed down, at half of the memory."""
    rows = []
    for slowdown in SLOWDOWNS:
        case = paper_case("decoder", (1, 4), slowdown=slowdown)
        instances = [each for each in sweep(case, FORMULATIONS, (50,)) if SMALLEST_PEAK not in each.own_solvers]
        rows += _transformer_rows(_run(instances, report), model="decoder", mesh="1x4", slowdown=slowdown)
    return rows


def _operators(report: Report) -> list[Row]:
    """Operators of the encoder's traced step, in primitives; the paper counts those of XLA's HLO."""
    rows = []
    for layers in OPERATOR_LAYERS:
        report(f"operators of {layers} layers")
        reference = ModelReference(
            "planner.papers.kiwi.models:encoder_of_primitives", batch=16, sequence=1024, layers=layers
        )
        session = PlanningSession(reference, paper_case("encoder", (2, 4)).spec(), (2, 4), "adamw")
        rows.append({"layers": layers, "operators": len(session.graph.operators)})
    return rows


TABLES: Mapping[str, Callable[[Report], Sequence[Row]]] = {
    "operators": _operators,
    "table_1": _table_1,
    "figure_5_encoder": partial(_figure_5, "encoder"),
    "figure_5_decoder": partial(_figure_5, "decoder"),
    "figure_6": _figure_6,
}
"""Makers of the tables by name."""
