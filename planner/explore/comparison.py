"""Plans of either kind side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from planner.explore.tables import AnyPlan, Table, plan_row, without_unused
from planner.layers.plan.document import LayerPlan
from planner.plan.decision import PlannedModel


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
        return without_unused([plan_row(name, plan) for name, plan in zip(self.names, self.plans, strict=True)])

    def notes(self) -> Sequence[str]:
        """Whether the plans are of steps that differ, so that their times do not compare."""
        models = [_model(plan) for plan in self.plans]
        steps = {(model.source, model.batch, model.dtype) for model in models}
        lengths = {model.sequence for model in models} - {None}  # older plans name one where the step has none
        differ = len(steps) > 1 or len(lengths) > 1
        return ["the plans are of different steps: model, batch, sequence or dtype differ"] if differ else []


def _model(plan: AnyPlan) -> PlannedModel:
    return plan.model if isinstance(plan, LayerPlan) else plan.decision.model
