"""A layer plan in the terms of torch's functions: styles, checkpoints and groups of FSDP2, by module of the model.

The layer executor rewrites a model into units; here the model stays as it is, so that only what its own forward can do
remains. What remains is the same computation in the same memory, and what does not is refused or named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from planner.layers.plan.document import LayerPlan, LayerSettings
from planner.models.references import TrainingStep
from planner.torch_adapter.tracing.transformers_masks import without_packing_checks
from runtime.layers.assignment import PlannedUnit, assign_layers, tied_parameters
from runtime.layers.families.units import LayerUnit, ModelFamily


class ExportError(ValueError):
    """A plan that the wanted engine cannot express; the message lists everything that stands in the way."""


@dataclass(frozen=True, slots=True)
class Group:
    """Modules whose parameters FSDP2 gathers together.

    Parameters
    ----------
    modules
        Their paths in the model.
    settings
        Settings of the layer that they are.
    """

    modules: tuple[str, ...]
    settings: LayerSettings


@dataclass(frozen=True, slots=True)
class UnitTranslation:
    """One unit of the model.

    Parameters
    ----------
    name
        Module path of a block; another name for the modules around the blocks.
    is_block
        Whether `name` is a module path.
    styles
        Style of each module that tensor parallelism divides, by path in the model: ``column``, ``row``,
        ``vocabulary_in``, ``vocabulary_out`` and, under sequence parallelism, ``norm`` and ``gather``.
    checkpoints, offloads
        Paths of the modules that keep only their input for the backward, and of those whose saved tensors wait on the
        host.
    groups
        Groups of FSDP2, innermost first.
    settings
        Settings of the unit.
    """

    name: str
    is_block: bool
    styles: Mapping[str, str]
    checkpoints: tuple[str, ...]
    offloads: tuple[str, ...]
    groups: tuple[Group, ...]
    settings: LayerSettings


@dataclass(frozen=True, slots=True)
class Translation:
    """A plan without a pipeline, in terms of modules.

    Parameters
    ----------
    units
        In the order in which they run.
    joined
        Groups of several units, which share a parameter.
    ties
        Names of parameters that are one, the first of each as it is after tensor parallelism.
    stand_ins
        Modules that the forward never calls, each with one that is called and has its parameters.
    sequence
        Module that first takes a part of the sequence, and the one that takes whole sequences again; None without
        sequence parallelism.
    """

    units: tuple[UnitTranslation, ...]
    joined: tuple[Group, ...]
    ties: tuple[tuple[str, ...], ...]
    stand_ins: tuple[tuple[str, str], ...]
    sequence: tuple[str, str] | None


def translate(plan: LayerPlan, step: TrainingStep, family: ModelFamily) -> Translation:
    """Express a plan that :func:`runtime.layers.check.check_model` passed.

    Parameters
    ----------
    plan
        The plan.
    step, family
        The training step on ``meta``, and the units of its model.

    Raises
    ------
    ExportError
        Stages, degrees that differ between layers, or modules that tensor parallelism would have to rewrite.
    """
    if len(plan.stages) > 1:
        raise ExportError(
            f"the plan has {len(plan.stages)} stages: torch's functions for a module have none; export it for "
            "torchtitan, or plan with one stage"
        )
    planned = assign_layers(plan, family)[0]
    if obstacles := [*_differing_degrees(plan), *_rewritten_modules(planned)]:
        raise ExportError("torch's functions cannot express this plan: " + "; ".join(obstacles))
    model = step.module
    paths = {module: path for path, module in model.named_modules()}
    called = _called(step)
    with_owners = partial(_with_owners, model=model, called=called)
    ends = {each.unit: with_owners(_modules(each.unit, paths)) for each in planned if not each.unit.is_block}
    joined = _joined_groups(planned, ends)
    in_joined = {path for group in joined for path in group.modules}
    units = tuple(_unit(each, paths, ends, in_joined) for each in planned)
    styled = {path for unit in units for path in unit.styles}
    return Translation(
        units=units,
        joined=joined,
        ties=_ties(model, styled),
        stand_ins=tuple(_stand_ins(model, called)),
        sequence=_sequence(units, planned, paths),
    )


def _differing_degrees(plan: LayerPlan) -> list[str]:
    """Degrees in which layers differ, so that hidden states would be resharded between them."""
    found = []
    for field in ("data_parallel", "tensor_parallel"):
        counts = Counter(getattr(layer, field) for layer in plan.layers)
        if len(counts) > 1:
            listed = " and ".join(f"{value} in {count}" for value, count in sorted(counts.items()))
            found.append(f"{field} is {listed} layers, and hidden states are not resharded between modules")
    blocks = [layer for layer in plan.layers if layer.shares_products and layer.name not in ("embedding", "head")]
    if len({layer.sequence_parallel for layer in blocks}) > 1:
        found.append("some blocks are sequence-parallel and some are not")
    return found


def _rewritten_modules(planned: Iterable[PlannedUnit]) -> list[str]:
    """What tensor parallelism would have to change in the model beyond its matrices."""
    found: dict[str, None] = {}
    for unit in (each.unit for each in planned if each.whole.shares_products):
        kind = type(unit).__name__
        for path, count in (unit.rules.fused or {}).items():
            found[f"{path.removeprefix('block.')} of {kind} is {count} matrices in one, which no style divides"] = None
        for path in unit.rules.replicated_tables:
            if path in dict(unit.named_modules()):
                found[f"{path.removeprefix('block.')} of {kind} is a table of all heads, which no style divides"] = None
        if type(unit).share_heads is not LayerUnit.share_heads:
            found[f"{kind} counts its heads itself, and has no place for its share"] = None
    return list(found)


def _unit(
    planned: PlannedUnit, paths: Mapping[nn.Module, str], ends: Mapping[LayerUnit, list[str]], in_joined: set[str]
) -> UnitTranslation:
    unit, whole = planned.unit, planned.whole
    found: dict[str, list[str]] = {"checkpoint": [], "offload_hidden": []}
    for layer, inside in planned.layers():
        for setting, modules in found.items():
            if getattr(layer, setting):
                modules += _modules(inside, paths)
    groups = [Group(tuple(_modules(inside, paths)), layer) for layer, inside in planned.layers() if planned.parts]
    groups.append(Group(tuple(ends.get(unit) or _modules(unit, paths)), whole))
    return UnitTranslation(
        name=unit.name,
        is_block=unit.is_block,
        styles=_styles(unit, whole, paths) if whole.shares_products else {},
        checkpoints=tuple(found["checkpoint"]),
        offloads=tuple(found["offload_hidden"]),
        groups=tuple(group for group in groups if not in_joined.issuperset(group.modules)),
        settings=whole,
    )


def _modules(inside: nn.Module, paths: Mapping[nn.Module, str]) -> list[str]:
    """Paths in the model of a module, or of those with parameters that a unit of ours is made of."""
    if inside in paths:
        return [paths[inside]]
    children = [child for child in inside.children() if next(child.parameters(), None) is not None]
    return [path for child in children for path in _modules(child, paths)]


def _styles(unit: LayerUnit, whole: LayerSettings, paths: Mapping[nn.Module, str]) -> dict[str, str]:
    modules, rules = dict(unit.named_modules()), unit.rules
    wanted = [("column", rules.column), ("row", rules.row)]
    if whole.sequence_parallel:
        wanted += [("norm", rules.norms), ("gather", rules.attention)]
    found = {paths[modules[path]]: style for style, listed in wanted for path in listed if path in modules}
    for path in rules.vocabulary:
        table = modules[path]
        found[paths[table]] = "vocabulary_in" if isinstance(table, nn.Embedding) else "vocabulary_out"
    return found


def _joined_groups(planned: Iterable[PlannedUnit], ends: Mapping[LayerUnit, list[str]]) -> tuple[Group, ...]:
    """Groups of the units that share a parameter, which FSDP2 must gather together; they are not blocks."""
    groups: list[list[PlannedUnit]] = []
    for held in tied_parameters([planned]).values():
        units = [each for _, each in held]
        touching = [group for group in groups if any(each in group for each in units)]
        rest = [each for each in units if not any(each in group for group in touching)]
        groups = [group for group in groups if group not in touching]
        groups.append([each for group in touching for each in group] + rest)
    modules = [dict.fromkeys(path for each in group for path in ends[each.unit]) for group in groups]
    return tuple(Group(tuple(paths), group[0].whole) for paths, group in zip(modules, groups, strict=True))


def _with_owners(modules: list[str], model: nn.Module, called: set[str]) -> list[str]:
    """Modules with all others that have a parameter of theirs: those that the forward calls, since calls gather."""
    held = {parameter for path in modules for parameter in model.get_submodule(path).parameters()}
    owners = [_owner(name) for name, each in model.named_parameters(remove_duplicate=False) if each in held]
    inside = tuple(f"{path}." for path in modules)
    others = [path for path in dict.fromkeys(owners) if path not in modules and not path.startswith(inside)]
    return [path for path in (*modules, *others) if path in called]


def _stand_ins(model: nn.Module, called: set[str]) -> Iterator[tuple[str, str]]:
    for names in _tied_names(model):
        owners = dict.fromkeys(map(_owner, names))
        kinds = {type(model.get_submodule(owner)): owner for owner in owners if owner in called}
        for owner in owners:
            other = kinds.get(type(model.get_submodule(owner)))
            if other is not None and owner not in called:
                yield owner, other


def _called(step: TrainingStep) -> set[str]:
    """Paths of the modules that the model's forward calls."""
    called: set[str] = set()

    def note(path: str, *_: object) -> None:
        called.add(path)

    hooks = [module.register_forward_hook(partial(note, path)) for path, module in step.module.named_modules()]
    with torch.no_grad(), without_packing_checks(step.module):
        step.module(*step.example_args, **step.example_kwargs)
    for hook in hooks:
        hook.remove()
    return called


def _ties(model: nn.Module, styled: set[str]) -> tuple[tuple[str, ...], ...]:
    """Names of parameters that are one and that tensor parallelism takes apart, one that it divided first."""
    apart = [held for held in _tied_names(model) if any(_owner(name) in styled for name in held)]
    return tuple(tuple(sorted(held, key=lambda name: _owner(name) not in styled)) for held in apart)


def _tied_names(model: nn.Module) -> list[list[str]]:
    """Names of every parameter that has several."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [held for held in names.values() if len(held) > 1]


def _owner(name: str) -> str:
    return name.rpartition(".")[0]


def _sequence(
    units: Iterable[UnitTranslation], planned: Iterable[PlannedUnit], paths: Mapping[nn.Module, str]
) -> tuple[str, str] | None:
    """First block of those that are sequence-parallel, and the first module after the last of them."""
    pairs = list(zip(units, planned, strict=True))
    shared = [number for number, (unit, _) in enumerate(pairs) if unit.settings.sequence_parallel]
    if not shared:
        return None
    after = _modules(pairs[shared[-1] + 1][1].unit, paths)
    return pairs[shared[0]][0].name, after[0]


def left_out(plan: LayerPlan) -> list[str]:
    """Settings that neither engine has a word for, and that cost memory or time but change no number."""
    reasons: list[tuple[Callable[[LayerSettings], bool], str]] = [
        (lambda layer: layer.offload_optimizer, "optimizer state on the host, parameters on the device"),
        (lambda layer: layer.slices > 1, "matrix products in slices"),
    ]
    found = []
    for applies, words in reasons:
        names = [layer.name for layer in plan.layers if applies(layer)]
        if names:
            found.append(f"{words}: {names[0]}" + (f" and {len(names) - 1} more layers" if len(names) > 1 else ""))
    if plan.model.loss_chunks > 1:
        found.append(f"the loss in {plan.model.loss_chunks} parts, one after the other")
    return found
