"""Plans of either kind side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planner.explore.tables import Table
from planner.layers.plan.document import LayerPlan
from planner.plan.document import Plan

_OF_ONE_KIND = ("recomputed", "collectives", "offloaded_bytes", "stages", "micro_batches")
"""Columns that plans of one kind have; shown where a plan has more than none."""


@dataclass(frozen=True, repr=False)
class Comparison(Table):
    """A table of plans side by side, of operators or of layers.

    Parameters
    ----------
    names, plans
        Each plan and its name in the table.
    """

    names: tuple[str, ...]
    plans: tuple[Plan | LayerPlan, ...]

    def title(self) -> str:
        """How many plans, and of which models."""
        models = dict.fromkeys(_model(plan).source for plan in self.plans)
        return f"{len(self.plans)} plans of {', '.join(models)}"

    def rows(self) -> list[dict[str, Any]]:
        """Time, bound, peak and what the plan does, per plan; what its kind does not have is None."""
        rows = [_row(name, plan) for name, plan in zip(self.names, self.plans, strict=True)]
        unused = {name for name in _OF_ONE_KIND if not any(row[name] for row in rows)}
        return [{name: value for name, value in row.items() if name not in unused} for row in rows]

    def notes(self) -> Sequence[str]:
        """Whether the plans are of steps that differ, so that their times do not compare."""
        steps = {(model.source, model.batch, model.sequence, model.dtype) for model in map(_model, self.plans)}
        return ["the plans are of different steps: model, batch, sequence or dtype differ"] if len(steps) > 1 else []


def _model(plan: Plan | LayerPlan) -> Any:
    return plan.model if isinstance(plan, LayerPlan) else plan.decision.model


def _row(name: str, plan: Plan | LayerPlan) -> dict[str, Any]:
    if isinstance(plan, LayerPlan):
        figures = {"stages": len(plan.stages), "micro_batches": plan.micro_batches}
    else:
        offloaded = plan.decision.predicted.host.offloaded_bytes
        figures = {"recomputed": plan.recomputed, "collectives": plan.collectives, "offloaded_bytes": offloaded}
    common = {
        "name": name,
        "seconds": plan.objective_seconds,
        "bound_seconds": plan.bound_seconds,
        "gap": plan.gap,
        "peak_bytes": plan.peak_bytes or None,
    }
    return common | {name: figures.get(name) for name in _OF_ONE_KIND}
