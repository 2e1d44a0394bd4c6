"""Plans of either kind side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planner.explore.tables import AnyPlan, Table, plan_row, without_unused
from planner.layers.plan.document import LayerPlan
from planner.plan.decision import Pin, PlannedModel


@dataclass(frozen=True, repr=False)
class Comparison(Table):
    """A table of plans side by side, of operators or of layers.

    Parameters
    ----------
    names, plans
        Each plan and its name in the table.
    """

    names: tuple[str, ...]
    plans: tuple[AnyPlan, ...]

    def title(self) -> str:
        """How many plans, and of which models."""
        models = dict.fromkeys(_model(plan).source for plan in self.plans)
        return f"{len(self.plans)} plans of {', '.join(models)}"

    def rows(self) -> list[dict[str, Any]]:
        """Time, bound, peak and what the plan does, per plan; what its kind does not have is None."""
        return without_unused([_row(name, plan) for name, plan in zip(self.names, self.plans, strict=True)])

    def notes(self) -> Sequence[str]:
        """Whether the plans are of steps that differ, so that their times do not compare."""
        models = [_model(plan) for plan in self.plans]
        steps = {(model.source, model.batch, model.dtype) for model in models}
        lengths = {model.sequence for model in models} - {None}  # older plans name one where the step has none
        lines = [
            f"{name} keeps {', '.join(map(str, _pins(plan)))}"
            for name, plan in zip(self.names, self.plans, strict=True)
            if _pins(plan)
        ]
        if len(steps) > 1 or len(lengths) > 1:
            lines.append("the plans are of different steps: model, batch, sequence or dtype differ")
        return lines


def _model(plan: AnyPlan) -> PlannedModel:
    return plan.model if isinstance(plan, LayerPlan) else plan.decision.model


def _pins(plan: AnyPlan) -> tuple[Pin, ...]:
    if isinstance(plan, LayerPlan):
        return () if plan.record is None else plan.record.pins
    return plan.decision.options.pins


def _row(name: str, plan: AnyPlan) -> dict[str, Any]:
    """Figures of a plan, with what it was asked for behind its name."""
    if isinstance(plan, LayerPlan):
        record = plan.record
        asked = {
            "formulation": "-" if record is None else record.formulation,
            "mesh": str(plan.devices),
            "limit_bytes": None if record is None else record.tensor_bytes,
            "status": None if record is None else record.status,
        }
    else:
        options = plan.decision.options
        asked = {
            "formulation": options.formulation,
            "mesh": "x".join(map(str, options.mesh)),
            "limit_bytes": options.limit_bytes,
            "status": str(plan.record.certificate.status),
        }
    return {"name": name, **asked, **plan_row(name, plan)}
