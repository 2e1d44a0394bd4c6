"""One process's run of a layer plan's training step: ``python -m runtime.layers.reference PLAN FOLDER --steps N``.

It writes the same files as :mod:`runtime.measure.reference` for an operator plan.
"""

from __future__ import annotations

from pathlib import Path

from planner.common.plan_error import PlanError
from planner.layers.plan.document import LayerPlan, load_layer_plan
from planner.layers.profiles.files import SOURCE_PREFIX
from planner.models.references import ModelReference, reference_of
from runtime.measure.reference import prepare_from_command_line


def model_reference(plan: LayerPlan) -> ModelReference:
    """Model reference of a layer plan.

    Raises
    ------
    PlanError
        It is of a profile file.
    """
    if plan.model.source.startswith(SOURCE_PREFIX):
        raise PlanError(
            f"model {plan.model.source} is a profile of layers, which has no module to run: plan hf:NAME or "
            "module.path:function"
        )
    return reference_of(plan.model)


def _step_of(path: Path) -> tuple[ModelReference, str, int]:
    plan = load_layer_plan(path)
    return model_reference(plan), plan.optimizer, 1


if __name__ == "__main__":
    prepare_from_command_line(_step_of)
