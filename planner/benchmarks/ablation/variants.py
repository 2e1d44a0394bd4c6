"""Variants of the engine: one technique left out, one tunable halved or doubled, or many tunables at once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from formulations.tuning.inventory import Constant, Kind, inventory
from formulations.tuning.overrides import WITHOUT

HALF, DOUBLE = 0.5, 2.0
TOGETHER = " together*"
"""Between the names of tunables that were changed at once, and the factor."""

GROUPS = {"techniques": Kind.TECHNIQUE, "tunables": Kind.TUNABLE}
"""Names that stand for all variants of a kind."""


class AblationError(ValueError):
    """A request that fits no variant or no instance; the message names it and the remedy."""


@dataclass(frozen=True, slots=True)
class Variant:
    """The engine with one constant changed.

    Parameters
    ----------
    name
        ``MODULE:CONSTANT`` with what happens to it: ``=off``, ``-MEMBER``, ``*0.5`` or ``*2``.
    constant
        What is changed; None for the engine as it is.
    overrides
        As :mod:`formulations.tuning.overrides` takes them.
    """

    name: str
    constant: Constant | None
    overrides: Mapping[str, Mapping[str, Any]]

    @property
    def is_compiled(self) -> bool:
        """Whether compiled loops read what is changed, so that they must be compiled anew."""
        return self.constant is not None and self.constant.is_compiled


BASELINE = Variant("baseline", None, {})
CONTROL = Variant("control", None, {})
"""The engine against itself: what differs is noise of the machine and of searches that the clock ends."""


def all_variants(constants: Iterable[Constant] | None = None) -> list[Variant]:
    """Return the control, then a variant for each technique, then those of all tunables."""
    found = inventory() if constants is None else list(constants)
    techniques = [v for constant in found if constant.kind is Kind.TECHNIQUE for v in _left_out(constant)]
    tunables = [v for constant in found if constant.kind is Kind.TUNABLE for v in _scaled(constant)]
    return [CONTROL, *techniques, *tunables]


def selected(variants: Sequence[Variant], only: Sequence[str]) -> list[Variant]:
    """Return the variants that any of some names fits, and the control before them.

    Parameters
    ----------
    variants
        Where to choose from.
    only
        ``techniques``, ``tunables``, a variant, a constant, a member, or a pattern with ``*`` for any of these.

    Raises
    ------
    AblationError
        A name fits no variant.
    """
    for name in only:
        if not any(_fits(variant, name) for variant in variants):
            raise AblationError(f"--only: {name!r} is no technique or tunable; see --list")
    return [v for v in variants if v == CONTROL or any(_fits(v, name) for name in only)]


def together(variants: Sequence[Variant], only: Sequence[str]) -> list[Variant]:
    """Return the control, and two variants: one with all tunables halved that some names fit, one with all doubled.

    Where such a variant loses nothing, a few solves say so of all its tunables.

    Raises
    ------
    AblationError
        A name fits no variant, or a technique.
    """
    found = selected(variants, only)[1:]
    if other := [v for v in found if v.constant is None or v.constant.kind is not Kind.TUNABLE]:
        raise AblationError(f"--together: {other[0].name} is a technique; name tunables only")
    groups = []
    for factor in (HALF, DOUBLE):
        members = [v for v in found if v.name.endswith(f"*{factor:g}")]
        if not members:
            continue
        overrides: dict[str, dict[str, Any]] = {}
        for variant in members:
            for module, values in variant.overrides.items():
                overrides.setdefault(module, {}).update(values)
        compiled = next((v.constant for v in members if v.is_compiled), None)
        name = f"{','.join(only)}{TOGETHER}{factor:g}"
        groups.append(Variant(name, compiled or members[0].constant, overrides))
    return [CONTROL, *groups]


def verdicts_of(constant: Constant, verdicts: Mapping[str, str]) -> list[str]:
    """Return a line for each variant of a constant, or of all tunables it was changed with, that has a verdict.

    Parameters
    ----------
    constant
        Of the inventory.
    verdicts
        By names of variants.
    """
    variants = all_variants([constant])[1:]
    place = _place(constant)
    lines = [f"{v.name.removeprefix(place)}: {verdicts[v.name]}" for v in variants if v.name in verdicts]
    for name, verdict in verdicts.items():
        only, together_with, factor = name.partition(TOGETHER)
        if together_with and any(_fits(variant, each) for variant in variants for each in only.split(",")):
            lines.append(f"with its table *{factor}: {verdict}")
    return lines


def scaled(value: Any, factor: float) -> Any:
    """Return a number or all numbers of a tuple times a factor; integers are rounded and stay at least 1."""
    if isinstance(value, tuple):
        return tuple(scaled(each, factor) for each in value)
    if isinstance(value, int):
        changed = (value * round(factor) if factor >= 1 else value // round(1 / factor)) if value else 0
        return max(1, changed) if value > 0 else changed
    return value * factor


def _left_out(constant: Constant) -> Iterator[Variant]:
    place = _place(constant)
    if isinstance(constant.value, bool):
        if constant.value:
            yield Variant(f"{place}=off", constant, {constant.module: {constant.name: False}})
        return
    for member in constant.value:
        yield Variant(f"{place}-{member}", constant, {constant.module: {constant.name: {WITHOUT: member}}})


def _scaled(constant: Constant) -> Iterator[Variant]:
    for factor in (HALF, DOUBLE):
        value = scaled(constant.value, factor)
        if value != constant.value:
            yield Variant(f"{_place(constant)}*{factor:g}", constant, {constant.module: {constant.name: value}})


def _place(constant: Constant) -> str:
    return f"{constant.module.removeprefix('formulations.')}:{constant.name}"


def _fits(variant: Variant, name: str) -> bool:
    constant = variant.constant
    if constant is None:
        return variant.name == name
    if name in GROUPS:
        return constant.kind is GROUPS[name]
    place = _place(constant)
    rest = variant.name.removeprefix(place)
    member = rest[1:] if rest.startswith("-") else ""
    names = (variant.name, place, constant.name, constant.name.lstrip("_"), member)
    return name in names or ("*" in name and any(fnmatchcase(each, name) for each in names if each))
