"""Pins of layers: decisions of a user about the settings of some layers, which every search of a formulation keeps."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING

from planner.common.plan_error import PlanError
from planner.graph.names import is_named
from planner.plan.decision import HOLDINGS, Pin

if TYPE_CHECKING:
    from planner.layers.plan.document import LayerSettings

_MOST_NAMES = 4


def layer_pin(target: str, decision: str | Sequence[str], names: Sequence[str], forbids: bool = False) -> Pin:
    """Pin of what a user wrote about layers.

    Parameters
    ----------
    target
        A layer, the module around several, or a pattern such as ``*.mlp``.
    decision
        ``keep``, ``recompute`` or ``offload`` of what backward reads, or a setting of
        :class:`~planner.layers.plan.document.LayerSettings` such as ``sharding=zero3`` or ``tensor_parallel=2``.
    names
        Names of the layers.
    forbids
        Whether the plan must not do it; else it has to.

    Raises
    ------
    PlanError
        No layer has the name, or there is no such decision.
    """
    if not any(is_about(target, name) for name in names):
        close = get_close_matches(target, names, _MOST_NAMES, 0.5) or list(names[:_MOST_NAMES])
        raise PlanError(f"{target!r} names no layer of this step; close to it: {', '.join(map(repr, close))}")
    text = decision.replace(" ", "") if isinstance(decision, str) else ",".join(decision)
    settings = _settings()
    if text not in HOLDINGS and text.partition("=")[0] not in settings:
        raise PlanError(
            f"decision {text!r} of layer {target!r} is unknown: write {', '.join(HOLDINGS)}, or a setting such as "
            f"sharding=zero3; settings are {', '.join(settings)}"
        )
    if text not in HOLDINGS and not text.partition("=")[2]:
        raise PlanError(f"decision {text!r} of layer {target!r} has no value: write one, such as {text}=2")
    return Pin(target=target, decision=text, forbids=forbids)


def is_about(target: str, name: str) -> bool:
    """Whether a target names a layer, or a module around it."""
    parts = name.split(".")
    return any(is_named(".".join(parts[: k + 1]), target) for k in range(len(parts)))


def broken_by(pins: Sequence[Pin], layer: LayerSettings) -> Pin | None:
    """The first pin that the settings of a layer do not keep; None where they keep all."""
    about = (pin for pin in pins if is_about(pin.target, layer.name))
    return next((pin for pin in about if _does(layer, pin.decision) is pin.forbids), None)


def about_layer(pins: Sequence[Pin], name: str) -> tuple[Pin, ...]:
    """The pins that are about a layer."""
    return tuple(pin for pin in pins if is_about(pin.target, name))


def _does(layer: LayerSettings, decision: str) -> bool:
    if decision in HOLDINGS:
        held = {"recompute": layer.checkpoint, "offload": layer.offload_hidden}
        return held[decision] if decision in held else not any(held.values())
    name, _, value = decision.partition("=")
    return str(getattr(layer, name)).lower() == value.lower()


def _settings() -> tuple[str, ...]:
    from planner.layers.plan.document import LayerSettings  # here, because the document holds pins

    return tuple(name for name in LayerSettings.model_fields if name != "name")
