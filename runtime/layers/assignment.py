"""Assignment of a layer plan's settings to the units of a model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from planner.common.plan_error import PlanError
from planner.layers.plan.document import LayerPlan, LayerSettings
from runtime.layers.families.units import LayerUnit, ModelFamily

_ALIKE = ("data_parallel", "tensor_parallel", "undivided", "sequence_parallel")
"""Settings that the parts of one block must share, since its hidden states are not resharded inside."""


@dataclass(frozen=True, eq=False)
class PlannedUnit:
    """A unit and its settings.

    Parameters
    ----------
    unit
        The unit.
    whole
        Settings of the unit, or of its first part.
    parts
        Settings of modules inside the unit that are layers of their own.
    """

    unit: LayerUnit
    whole: LayerSettings
    parts: tuple[LayerSettings, ...]

    def layers(self) -> list[tuple[LayerSettings, nn.Module]]:
        """Settings with their modules: the parts, or the unit as a whole."""
        if not self.parts:
            return [(self.whole, self.unit)]
        return [
            (part, self.unit.get_submodule(path)) for part in self.parts for path in part_paths(self.unit, part.name)
        ]

    def settings_at(self, path: str) -> LayerSettings:
        """Settings at a path inside the unit: those of the part around it, or of the whole."""
        inside = (
            part
            for part in self.parts
            if any(f"{path}.".startswith(f"{inner}.") for inner in part_paths(self.unit, part.name))
        )
        return next(inside, self.whole)


def assign_layers(plan: LayerPlan, family: ModelFamily) -> tuple[tuple[PlannedUnit, ...], ...]:
    """Units with their settings, by stage.

    Raises
    ------
    PlanError
        Layers are unknown, missing or in another order than the model's, a unit is cut by a stage, or parts of one
        unit differ in settings that they must share.
    """
    units = list(family.units)
    _check_names(plan, units)
    stages = []
    for number, stage in enumerate(plan.stages):
        waiting = list(stage.layers)
        assigned = []
        while waiting:
            unit = units[0] if units else None
            if unit is None or _unit_of(waiting[0].name, [unit]) is None:
                wanted = f"the next layer of the model is {unit.name}" if unit else "the model has no more layers"
                raise PlanError(f"stage {number}: layer {waiting[0].name} is out of order: {wanted}")
            count = next((k for k, layer in enumerate(waiting) if _unit_of(layer.name, [unit]) is None), len(waiting))
            assigned.append(_planned_unit(unit, waiting[:count]))
            del waiting[:count], units[0]
        stages.append(tuple(assigned))
    if units:
        raise PlanError(f"layer {units[0].name} of the model is in no stage: give every layer of the model")
    return tuple(stages)


def _check_names(plan: LayerPlan, units: list[LayerUnit]) -> None:
    unknown = [layer.name for layer in plan.layers if _unit_of(layer.name, units) is None]
    if unknown:
        known = ", ".join(unit.name for unit in units)
        raise PlanError(f"the model has no layer {unknown[0]}: its layers are {known}, and modules inside blocks")
    if len(plan.stages) > len(units):
        raise PlanError(f"{len(plan.stages)} stages for {len(units)} layers: possible are 1 to {len(units)}")


def _unit_of(name: str, units: list[LayerUnit]) -> LayerUnit | None:
    """Unit that a layer is, or that it is a part of."""
    return next(
        (unit for unit in units if name == unit.name or (unit.is_block and name.startswith(f"{unit.name}."))), None
    )


def _planned_unit(unit: LayerUnit, layers: list[LayerSettings]) -> PlannedUnit:
    first = layers[0]
    if first.name == unit.name:
        if len(layers) > 1:
            raise PlanError(
                f"layer {layers[1].name} is inside layer {unit.name}, which is planned as a whole: give one"
            )
        return PlannedUnit(unit, first, ())
    for layer in layers:
        for field in _ALIKE:
            if getattr(layer, field) != getattr(first, field):
                raise PlanError(
                    f"layers {first.name} and {layer.name} are parts of {unit.name} and must have the same {field}: "
                    "what may differ is sharding, checkpoint, offload and slices"
                )
        _check_part(unit, layer.name)
    paths = [path for layer in layers for path in part_paths(unit, layer.name)]
    inside = next((path for path in paths for other in paths if path.startswith(f"{other}.")), None)
    if inside is not None or len(set(paths)) < len(paths):
        raise PlanError(f"layers of {unit.name} contain one another ({_listed(layers)}): give each module once")
    return PlannedUnit(unit, first, tuple(layers))


def _check_part(unit: LayerUnit, name: str) -> None:
    modules = dict(unit.named_modules())
    for path in part_paths(unit, name):
        if path not in modules or isinstance(modules[path], nn.ModuleList):
            inside = [*unit.roles, *(child for child, _ in modules["block"].named_children())]
            raise PlanError(
                f"layer {name} is not a called module of {unit.name}; choose one of {unit.name}.("
                f"{'|'.join(dict.fromkeys(inside))})"
            )
        if any(path.startswith(f"{module}.") for module in unit.rules.attention):
            raise PlanError(
                f"layer {name} is inside an attention module, whose matrices are run alike: give the module"
            )


def part_paths(unit: LayerUnit, name: str) -> tuple[str, ...]:
    """Paths inside a unit of a part, which is named by its role or by its module path."""
    suffix = name.removeprefix(f"{unit.name}.")
    return unit.roles.get(suffix, (f"block.{suffix}",))


def _listed(layers: list[LayerSettings]) -> str:
    return ", ".join(layer.name for layer in layers)


def tied_parameters(
    stages: Iterable[Iterable[PlannedUnit]],
) -> dict[nn.Parameter, list[tuple[int, PlannedUnit]]]:
    """Parameters that more than one unit has, with the stages and units that have them."""
    holders: dict[nn.Parameter, list[tuple[int, PlannedUnit]]] = {}
    for number, stage in enumerate(stages):
        for planned in stage:
            for parameter in planned.unit.parameters():
                holders.setdefault(parameter, []).append((number, planned))
    return {parameter: held for parameter, held in holders.items() if len(held) > 1}
