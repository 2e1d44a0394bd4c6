"""Plan files as code of another engine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from planner.layers.plan.check import check_layer_plan
from planner.layers.plan.document import is_layer_plan, load_layer_plan
from planner.models.references import check_code, load_step, reference_of
from planner.plan.document import load_plan
from runtime.export.operator_form import layer_form
from runtime.export.titan_file import titan_file
from runtime.export.torch_file import torch_file
from runtime.export.translation import ExportError, left_out, translate
from runtime.layers.check import check_model
from runtime.layers.families.registry import model_family
from runtime.layers.families.units import FamilyError
from runtime.layers.reference import model_reference

Engine = Literal["torch", "torchtitan"]
"""Whose words a plan is expressed in."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A plan as a Python file.

    Parameters
    ----------
    text
        Of the file.
    left_out
        Parts of the plan that are not in it, which cost memory or time but change no number.
    """

    text: str
    left_out: tuple[str, ...]


def exported(path: Path, engine: Engine, name: str, flavor: str | None = None, allow_code: bool = False) -> Exported:
    """Express the plan of a file in the words of another engine.

    Parameters
    ----------
    path
        File of a plan of layers, or of one of operators.
    engine
        ``torch``: FSDP2, tensor parallelism and checkpoints by torch's functions; ``torchtitan``: a job of its.
    name
        Name of the Python file.
    flavor
        Model of torchtitan; None: the one of the plan's sizes.
    allow_code
        Whether a model that is code of another module may be imported.

    Raises
    ------
    PlanError
        The plan cannot be read, contradicts itself, or its layers are not the model's.
    ModelError
        The model is unknown, or code that was not allowed.
    FamilyError
        The model has no layers that are known, or they cannot be run as planned.
    ExportError
        The engine cannot express the plan; the message lists everything that stands in the way.
    """
    different: tuple[str, ...] = ()
    if is_layer_plan(path):
        plan = load_layer_plan(path)
        check_code(plan.model.source, allow_code)
        step = load_step(model_reference(plan), "meta")
        family = model_family(step)
    else:
        operators = load_plan(path)
        check_code(operators.decision.model.source, allow_code)
        step = load_step(reference_of(operators.decision.model), "meta")
        try:
            family = model_family(step)
        except FamilyError as error:
            raise ExportError(
                f"{error}. As code of another engine it cannot be expressed: run it here (meshwright run, runtime.load)"
            ) from error
        plan, different = layer_form(operators, [unit.name for unit in family.units])
    check_layer_plan(plan)
    check_model(plan, family, step.example_kwargs)
    missing = (*different, *left_out(plan))
    if engine == "torchtitan":
        return Exported(titan_file(plan, step, name, flavor), missing)
    return Exported(torch_file(plan, step, translate(plan, step, family), missing, name), missing)
