"""Checks whether a model and torch's engine can run a layer plan, before anything is built."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy

from torch import Tensor

from planner.common.plan_error import PlanError
from planner.layers.plan.check import check_shared
from planner.layers.plan.document import LayerPlan, LayerSettings
from planner.models.references import load_step
from runtime.layers.assignment import PlannedUnit, assign_layers, part_paths, tied_parameters
from runtime.layers.families.registry import model_family
from runtime.layers.families.units import Carried, FamilyError, LayerUnit, ModelFamily
from runtime.layers.parameters import Origin, Origins, split_linears
from runtime.layers.reference import model_reference
from runtime.layers.tensor_parallel import check_products

_PLACE = (
    "data_parallel",
    "sharding",
    "shard_degree",
    "tensor_parallel",
    "undivided",
    "offload_parameters",
    "offload_optimizer",
)
"""Settings that determine the placement of a parameter."""


def refusal(plan: LayerPlan) -> str | None:
    """Reason why a plan cannot be run, or None where it can; only the model's configuration is loaded."""
    try:
        step = load_step(model_reference(plan), "meta")
        check_model(plan, model_family(step), step.example_kwargs)
    except (FamilyError, PlanError) as error:
        return str(error)
    return None


def check_comparable(family: ModelFamily) -> None:
    """Refuse to compare a model with one process if its random numbers differ between ranks.

    Raises
    ------
    FamilyError
        The model drops values.
    """
    if family.dropout > 0:
        raise FamilyError(
            f"--check: the model drops values with probability {family.dropout}, and ranks draw other random "
            "numbers than one process: plan with --dropout 0, or leave --check out"
        )


def check_model(plan: LayerPlan, family: ModelFamily, batch: Mapping[str, Tensor]) -> None:
    """Refuse a plan that cannot be run.

    Parameters
    ----------
    plan
        A plan that passes :func:`planner.layers.plan.check.check_layer_plan`.
    family
        The model's units, without storage or with it; they are left as they are.
    batch
        Example arguments by name.

    Raises
    ------
    PlanError
        The plan's layers are not the model's, or layers that share a parameter have it in different places or in more
        than two stages.
    FamilyError
        Heads, widths, the vocabulary or the sequence cannot be shared, or a matrix cannot be sliced, by the plan's
        degrees; dropout under tensor parallelism; slices outside blocks, or partly replicated under tensor parallelism.
    """
    stages = assign_layers(plan, family)
    lengths = family.sequence(batch)
    for number, stage in enumerate(stages[:-1]):
        if not plan.is_even and Carried.SHARED in stage[-1].unit.gives:
            raise FamilyError(
                f"stages {number} and {number + 1}: {stage[-1].unit.name} hands over a tensor that is the same on all "
                "devices, which cannot pass between stages with different numbers of devices: give all stages equally "
                "many"
            )
    for planned in (one for stage in stages for one in stage):
        for layer, _ in planned.layers():
            _check_layer(layer, planned.unit, family)
        if planned.whole.sequence_parallel:
            _check_sequences(planned, lengths)
        _check_matrices(planned)
    for held in tied_parameters(stages).values():
        check_shared(plan, {planned.whole.name for _, planned in held})
        for _, other in held[1:]:
            _check_same_place(held[0][1].whole, other.whole)


def _check_layer(layer: LayerSettings, unit: LayerUnit, family: ModelFamily) -> None:
    if layer.tensor_parallel > 1 and family.dropout > 0:
        raise FamilyError(
            f"layer {layer.name}: tensor-parallel {layer.tensor_parallel} with dropout {family.dropout} would drop the "
            "same values in different shards, or different values in equal replicas: set dropout to 0"
        )
    if layer.slices > 1 and not unit.is_block:
        raise FamilyError(
            f"layer {layer.name} cannot be cut into slices, only the matrices of blocks can: set slices 1"
        )
    if layer.shares_products and layer.sharded_slices not in (None, layer.slices):
        raise FamilyError(
            f"layer {layer.name}: FSDP2 takes all slices of a tensor-parallel matrix on one mesh, so {layer.slices} "
            f"slices of which {layer.sharded_slices} are sharded cannot be run: leave sharded_slices out"
        )


def _check_sequences(planned: PlannedUnit, lengths: tuple[int, ...]) -> None:
    parts = planned.whole.tensor_parallel
    odd = next((length for length in lengths if length % parts), None)
    if odd is not None and Carried.HIDDEN in planned.unit.takes:
        raise FamilyError(
            f"layer {planned.whole.name}: a sequence of {odd} cannot be shared by {parts} devices: change the sequence "
            "or leave sequence_parallel out"
        )


def _check_matrices(planned: PlannedUnit) -> None:
    """Check the matrix products that would be shared, on a copy of the unit cut as the executor cuts it."""
    unit = deepcopy(planned.unit).to("meta")
    origins: Origins = {parameter: Origin(name) for name, parameter in unit.named_parameters()}
    shares = planned.whole.shares_products
    for layer in planned.parts or (planned.whole,):
        for path in part_paths(unit, layer.name) if planned.parts else ("",):
            inside = unit.get_submodule(path)
            split_linears(unit, inside, origins, tensor_parallel=shares, slices=layer.slices, name=layer.name)
    if shares:
        check_products(unit, planned.whole.tensor_parallel, planned.whole.sequence_parallel)


def _check_same_place(first: LayerSettings, other: LayerSettings) -> None:
    for field in _PLACE:
        if getattr(first, field) != getattr(other, field):
            raise PlanError(
                f"layers {first.name} and {other.name} share a parameter, which has one place, but differ in {field}: "
                "give both the same, or untie them in the model's configuration"
            )
