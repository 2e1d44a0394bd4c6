"""Tables of CAPTURE's Figure 7 on local runs: 500 random plans for each schedule, pipelines and mixed plans.

Two small models have half of the plans each. A cell is a few plans, so an interrupted run goes on where it was; the
profiling runs are repeated then. In the pipelines every stage has one device, in the mixed plans one or two, and some
stage has two, by data or by tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from formulations.capture.sampling import prediction_errors
from formulations.layers.pipeline_schedule import Schedule
from planner.papers.cells import Cell, Row, Table
from runtime.figure_7.errors import PREDICTORS
from runtime.prediction.local_tables.figure_7_cases import MODELS, LocalCase, part_of_plans

__all__ = ["PLANS", "TABLES", "plan_rows"]

PLANS = 500
"""Of each table, as in the paper."""

_PLANS_OF_CELL = 25
_DIGITS = 5

_CASES: Mapping[str, Mapping[str, object]] = {
    "pipelines": {"blocks": 12},
    "mixed": {"blocks": 9, "degrees": (1, 2), "micro_batches": 6},
}
"""As many layers that a model has 250 different plans; micro-batches for the six stages of the profiling runs."""


def plan_rows(case: LocalCase, first: int, end: int) -> Iterator[Row]:
    """Relative errors of every predictor for every GPU of a range of plans, a row for each plan."""
    for plan in part_of_plans(case, first, end):
        row: Row = {
            "model": case.model,
            "schedule": str(case.schedule),
            "stages": [
                f"{layers}x{kind}" if devices > 1 else str(layers)
                for layers, devices, kind in zip(plan.layers, plan.devices, plan.kinds, strict=True)
            ],
            "peak_bytes": max(plan.held),
        }
        for name in PREDICTORS:
            errors = prediction_errors([plan.predicted[name]], [plan.held])
            row[f"{name}_gpus"] = [round(float(error), _DIGITS) for error in errors.per_gpu]
            row[f"{name}_plan"] = round(float(errors.per_plan[0]), _DIGITS)
        yield row


def _cells(kind: str, schedule: Schedule) -> Iterator[Cell]:
    for model in MODELS:
        case = LocalCase(model, schedule, **_CASES[kind])  # type: ignore[arg-type]
        for first in range(0, PLANS // len(MODELS), _PLANS_OF_CELL):
            end = first + _PLANS_OF_CELL
            yield Cell(f"{model}, plans {first + 1} to {end}", partial(plan_rows, case, first, end))


_ERRORS = frozenset({"peak_bytes", *(f"{name}_{what}" for name in PREDICTORS for what in ("gpus", "plan"))})

TABLES: Mapping[str, Table] = {
    f"figure_7_local_{kind}_{name}": Table(partial(_cells, kind, schedule), _ERRORS)
    for kind in _CASES
    for name, schedule in (("gpipe", Schedule.GPIPE), ("1f1b", Schedule.ONE_F_ONE_B))
}
"""Tables by name; an hour or so altogether, so each is run only where it is named."""
