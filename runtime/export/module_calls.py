"""The calls of torch's functions that divide, checkpoint and shard the modules of a model, as text.

Blocks that follow one another in a list and are planned alike are written as one loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from textwrap import indent
from typing import Any

from planner.layers.plan.document import LayerPlan, LayerSettings
from runtime.export.translation import Group, Translation, UnitTranslation

_STYLES = {
    "column": "ColwiseParallel()",
    "row": "RowwiseParallel()",
    "vocabulary_in": "RowwiseParallel(input_layouts=Replicate())",
    "vocabulary_out": "ColwiseParallel(output_layouts=Replicate())",
}
_SEQUENCE_STYLES = _STYLES | {
    "column": "ColwiseParallel(input_layouts=Shard(1))",
    "row": "RowwiseParallel(output_layouts=Shard(1))",
    "norm": "SequenceParallel(use_local_output=True)",
}


def parallelize(plan: LayerPlan, found: Translation) -> str:
    """Text of the function that divides, checkpoints and shards the modules of a model.

    Parameters
    ----------
    plan, found
        The plan, and the plan in terms of modules.
    """
    body = [*_meshes(plan, found), *_tensor_lines(found), *_memory_lines(found), *_sharding_lines(plan, found)]
    head = [
        "def parallelize(model: nn.Module, device_type: str) -> None:",
        '    """Divide, checkpoint and shard the modules of a model in place; a collective of all ranks."""',
    ]
    return "\n".join([*head, indent("\n".join(body), "    ")])


def _meshes(plan: LayerPlan, found: Translation) -> list[str]:
    names = '("replicas", "shards", "tensor")'
    lines = []
    for replicas, shards in _mesh_shapes(found):
        shape, mesh = f"({replicas}, {shards}, {plan.devices // replicas // shards})", _mesh(replicas, shards)
        lines.append(f"{mesh} = init_device_mesh(device_type, {shape}, mesh_dim_names={names})")
        lines.append(f'{_data(replicas, shards)} = {mesh}["replicas", "shards"]')
    return lines


def _mesh_shapes(found: Translation) -> list[tuple[int, int]]:
    return sorted({(group.settings.replicas, group.settings.shards) for group in groups(found)})


def _mesh(replicas: int, shards: int) -> str:
    return f"mesh_{replicas}x{shards}"


def _data(replicas: int, shards: int) -> str:
    return f"data_{replicas}x{shards}"


def _tensor_mesh(settings: LayerSettings) -> str:
    return f'{_mesh(settings.replicas, settings.shards)}["tensor"]'


def _tensor_lines(found: Translation) -> list[str]:
    lines: list[str] = []

    def key(unit: UnitTranslation) -> object:
        settings = unit.settings
        mesh = settings.replicas, settings.shards, settings.tensor_parallel, settings.sequence_parallel
        return mesh, _inside(unit, unit.styles)

    for units in _runs(found.units, key):
        first = units[0]
        if not first.styles:
            continue
        target = _loop(lines, units)
        mesh, inset = _tensor_mesh(first.settings), "    " if len(units) > 1 else ""
        styles = {path: style for path, style in first.styles.items() if style != "gather"}
        prefix = first.name + "." if first.is_block else ""
        lines.append(f"{inset}parallelize_module({target}, {mesh}, {{")
        lines += [
            f'{inset}    "{path.removeprefix(prefix)}": {_style(first, style)},' for path, style in styles.items()
        ]
        lines.append(f"{inset}}})")
        for path in (path for path, style in first.styles.items() if style == "gather"):
            inside = _attribute(target, path.removeprefix(prefix))
            lines.append(f"{inset}redistribute_input({inside}, {mesh}, Shard(1), Replicate(), local=False)")
    if found.sequence is not None:
        enters, leaves = (_attribute("model", path) for path in found.sequence)
        mesh = next(_tensor_mesh(unit.settings) for unit in found.units if unit.settings.sequence_parallel)
        lines.append(f"redistribute_input({enters}, {mesh}, Replicate(), Shard(1))")
        lines.append(f"redistribute_input({leaves}, {mesh}, Shard(1), Replicate())")
    for first_name, *others in found.ties:
        lines += [f"{_attribute('model', other)} = {_attribute('model', first_name)}" for other in others]
    return lines


def _memory_lines(found: Translation) -> list[str]:
    """Checkpoints around what waits on the host, as the executor has them."""
    lines: list[str] = []
    for units in _runs(found.units, lambda unit: (_inside(unit, unit.checkpoints), _inside(unit, unit.offloads))):
        first = units[0]
        calls = [(path, "checkpointed") for path in first.checkpoints]
        calls += [(path, "saved_on_host") for path in first.offloads]
        if calls:
            target = _loop(lines, units)
            prefix = first.name if first.is_block else ""
            inset = "    " if len(units) > 1 else ""
            lines += [f"{inset}{word}({_attribute(target, _relative(path, prefix))})" for path, word in calls]
    return lines


def _sharding_lines(plan: LayerPlan, found: Translation) -> list[str]:
    lines: list[str] = []

    def key(unit: UnitTranslation) -> object:
        return tuple((_inside(unit, group.modules), _placed(group)) for group in unit.groups)

    for units in _runs(found.units, key):
        first = units[0]
        if first.groups:
            target = _loop(lines, units)
            prefix = first.name if first.is_block else ""
            inset = "    " if len(units) > 1 else ""
            lines += [f"{inset}{_fully_shard(plan, group, target, prefix)}" for group in first.groups]
    lines += [f"{_attribute('model', path)} = {_attribute('model', other)}" for path, other in found.stand_ins]
    lines += [_fully_shard(plan, group, "model", "") for group in found.joined]
    whole = found.units[0].settings
    mesh = _data(whole.replicas, whole.shards)
    arguments = ["model", f"mesh={mesh}", "reshard_after_forward=False", *precision(plan)]
    return [*lines, f"fully_shard({', '.join(arguments)})"]


def _placed(group: Group) -> tuple[object, ...]:
    settings = group.settings
    return settings.replicas, settings.shards, settings.sharding, settings.offload_parameters


def _fully_shard(plan: LayerPlan, group: Group, target: str, prefix: str) -> str:
    modules = [_attribute(target, _relative(path, prefix)) for path in group.modules]
    settings = group.settings
    arguments = [
        modules[0] if len(modules) == 1 else f"[{', '.join(modules)}]",
        f"mesh={_data(settings.replicas, settings.shards)}",
        f"reshard_after_forward={settings.sharding != 'zero2'}",
    ]
    if settings.offload_parameters:
        arguments.append('offload_policy=CPUOffloadPolicy(pin_memory=device_type == "cuda")')
    return f"fully_shard({', '.join([*arguments, *precision(plan)])})"


def _runs(units: Sequence[UnitTranslation], key: Any) -> list[list[UnitTranslation]]:
    """Units in runs that are written alike: blocks of one list, one after the other, with an equal key."""

    def alike(unit: UnitTranslation) -> object:
        return (unit.name.rpartition(".")[0], key(unit)) if unit.is_block else (unit.name,)

    return [list(run) for _, run in groupby(units, key=alike)]


def _inside(unit: UnitTranslation, paths: Iterable[str]) -> tuple[str, ...]:
    return tuple(_relative(path, unit.name if unit.is_block else "") for path in paths)


def _relative(path: str, prefix: str) -> str:
    return path.removeprefix(prefix).removeprefix(".") if prefix else path


def _loop(lines: list[str], units: list[UnitTranslation]) -> str:
    """Name by which the lines that follow call the run's module; a loop is opened where there are several."""
    first = units[0]
    if not first.is_block:
        return "model"
    if len(units) == 1:
        return _attribute("model", first.name)
    held, _, start = first.name.rpartition(".")
    lines.append(f"for block in {_attribute('model', held)}[{start}:{int(start) + len(units)}]:")
    return "block"


def _attribute(target: str, path: str) -> str:
    """Python expression of a module below another."""
    words = path.split(".") if path else []
    return target + "".join(f"[{word}]" if word.isdigit() else f".{word}" for word in words)


def groups(found: Translation) -> Iterable[Group]:
    """Yield the groups of FSDP2 of units, then those of several."""
    yield from (group for unit in found.units for group in unit.groups)
    yield from found.joined


def precision(plan: LayerPlan) -> list[str]:
    """The argument of FSDP2 for dtypes, where parameters are gathered or gradients summed in another than their own."""
    dtypes = [f"param_dtype=torch.{plan.model.dtype}"] if keeps_master(plan) else []
    if plan.model.reduce_dtype == "float32":
        dtypes.append("reduce_dtype=torch.float32")
    return [f"mp_policy=MixedPrecisionPolicy({', '.join(dtypes)})"] if dtypes else []


def keeps_master(plan: LayerPlan) -> bool:
    """Whether parameters are kept in 32 bits and gathered in 16."""
    return plan.optimizer == "adamw_mixed" and plan.model.dtype in ("bfloat16", "float16")


def style_texts(found: Translation) -> set[str]:
    """Return every style that is used, as it is written."""
    return {_style(unit, style) for unit in found.units for style in unit.styles.values() if style != "gather"}


def _style(unit: UnitTranslation, style: str) -> str:
    return (_SEQUENCE_STYLES if unit.settings.sequence_parallel else _STYLES)[style]
