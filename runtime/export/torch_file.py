"""Writes a layer plan as a Python file that needs torch and the model alone.

The file has ``build_model``, ``parallelize`` and a training loop on random tokens; a user takes ``parallelize`` to a
loop of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from itertools import groupby
from textwrap import indent, wrap
from typing import Any

from torch import Tensor

from planner.layers.plan.document import LayerPlan, LayerSettings
from planner.models.references import ModelReference, TrainingStep, function_options
from runtime.export.translation import Group, Translation, UnitTranslation
from runtime.measure.optimizer import HYPERPARAMETERS

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
_NO_ARGUMENTS = ("transformers_version", "model_type", "architectures", "dtype", "torch_dtype")
"""Fields of a configuration that its class sets itself."""

_CHECKPOINTED = '''
def checkpointed(module: nn.Module) -> None:
    """Keep a module's input alone for its backward, which runs its forward again."""
    module.forward = partial(checkpoint, module.forward, use_reentrant=False)
'''
_ON_HOST = '''
def saved_on_host(module: nn.Module) -> None:
    """Keep on the host what a module saves for its backward, its parameters excepted."""
    forward = module.forward

    def pack(tensor):
        own = (each.to_local() if isinstance(each, DTensor) else each for each in module.parameters())
        held = {each.untyped_storage().data_ptr() for each in own}
        moves = not isinstance(tensor, DTensor) and tensor.is_floating_point()
        if not moves or tensor.untyped_storage().data_ptr() in held:
            return None, tensor
        return tensor.device, tensor.to("cpu", copy=True)

    def unpack(packed):
        device, tensor = packed
        return tensor if device is None else tensor.to(device)

    def kept(*args, **kwargs):
        with saved_tensors_hooks(pack, unpack):
            return forward(*args, **kwargs)

    module.forward = kept
'''
_REDISTRIBUTED = '''
def redistribute_input(module: nn.Module, mesh: DeviceMesh, source, target, local: bool = True) -> None:
    """Give a module its first input in another placement."""

    def hook(_, args, kwargs):
        hidden = args[0] if args else kwargs["hidden_states"]
        placed = DTensor.from_local(hidden, mesh, [source], run_check=False).redistribute(placements=[target])
        placed = placed.to_local() if local else placed
        return ((placed, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": placed})

    module.register_forward_pre_hook(hook, with_kwargs=True)
'''
_MAIN = '''
def main() -> None:
    """Train a few steps on random tokens and print the losses; every rank has its rows of each batch."""
    on_cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_cuda else torch.device("cpu")
    if on_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_cuda else "gloo")
    torch.manual_seed(SEED)  # every rank starts from the same parameters
    model = build_model().to(device)
    parallelize(model, device.type)
    optimizer = {optimizer}
    rows = dist.get_rank() // TENSOR_PARALLEL
    for step in range(STEPS):
        own = {{name: tensor.chunk(DATA_PARALLEL)[rows] for name, tensor in batch_of(step).items()}}
        loss = train_step(model, optimizer, own, device)
        dist.all_reduce(loss)
        if dist.get_rank() == 0:
            print(f"step {{step + 1}} loss {{loss.item() / dist.get_world_size():.6f}}", flush=True)
    dist.destroy_process_group()


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: dict, device: torch.device) -> torch.Tensor:
    """One step of the optimizer on this rank's rows; gradients are reduced in the last backward."""
    total = torch.zeros((), device=device)
    for number in range(MICRO_BATCHES):
        part = {{name: tensor.chunk(MICRO_BATCHES)[number].to(device) for name, tensor in rows.items()}}
{accumulation}        loss = model(**part).loss / MICRO_BATCHES
        loss.backward()
        total += loss.detach()
    optimizer.step()
    optimizer.zero_grad()
    return total


if __name__ == "__main__":
    main()
'''
_ACCUMULATION = """\
        is_last = number == MICRO_BATCHES - 1
        model.set_is_last_backward(is_last)
        model.set_requires_gradient_sync(is_last)
"""
_FREED_LAST = """\
        for path in GATHERED_ONCE:
            model.get_submodule(path).set_reshard_after_backward(is_last, recurse=False)
"""


def torch_file(plan: LayerPlan, step: TrainingStep, found: Translation, left_out: Sequence[str], name: str) -> str:
    """Text of the file.

    Parameters
    ----------
    plan, step
        The plan, and the training step of its model.
    found
        The plan in terms of modules.
    left_out
        What is not in the file, for its first lines.
    name
        Name of the file, which its first lines show.
    """
    sections = [
        _docstring(plan, left_out, name),
        _imports(plan, step, found),
        _constants(plan, found),
        _build_model(plan, step.module),
        _batch_of(step),
        _helpers(found),
        _parallelize(plan, found),
        _main(plan, found),
    ]
    return "\n\n".join(section.strip("\n") + "\n" for section in sections if section)


def _docstring(plan: LayerPlan, left_out: Sequence[str], name: str) -> str:
    record = plan.record
    lines = [f'"""{plan.model.source} on {plan.devices} devices, as it was planned: torch\'s own parallelism.', ""]
    if record is not None:
        predicted = f"{record.status} by {record.formulation}, {record.objective_seconds:.4g} s a step"
        lines += [f"Planned: {predicted}, {plan.peak_bytes} bytes on the fullest device.", ""]
    lines += [f"    torchrun --nproc-per-node {plan.devices} {name}", ""]
    lines += wrap(
        "trains on random tokens and prints the losses. ``parallelize`` is what a training script of your own needs, "
        "before it makes its optimizer; ranks with the same tensor-parallel group take the same rows. Losses are the "
        "mean of every rank's, which is that of the batch where all rows have equally many labels.",
        100,
    )
    if left_out:
        lines += ["", "Not in this file, which costs memory or time but changes no number:", ""]
        lines += [f"- {words}" for words in left_out]
    return "\n".join([*lines, '"""'])


def _imports(plan: LayerPlan, step: TrainingStep, found: Translation) -> str:
    helpers, styles = _helpers(found), _style_texts(found)
    text = " ".join([helpers, *styles])
    lines = ["from __future__ import annotations", "", "import os"]
    lines += ["from functools import partial"] if "partial(" in helpers else []
    lines += ["", "import torch", "import torch.distributed as dist"]
    kind = type(step.module)
    if plan.model.source.startswith("hf:"):
        names = sorted({type(step.module.config).__name__, kind.__name__})
        own = f"from transformers import {', '.join(names)}"
    else:
        module, _, function = plan.model.source.partition(":")
        own = f"from {module} import {function}"
    lines += ["from torch import nn"]
    lines += ["from torch.autograd.graph import saved_tensors_hooks"] if "saved_tensors_hooks" in helpers else []
    meshes = "DeviceMesh, init_device_mesh" if "DeviceMesh" in helpers else "init_device_mesh"
    lines += [f"from torch.distributed.device_mesh import {meshes}"]
    lines += [f"from torch.distributed.fsdp import {', '.join(_fsdp_names(plan, found))}"]
    if found.sequence is not None:
        text += "Replicate() Shard(1)"
    placements = [word for word in ("DTensor", "Replicate", "Shard") if re.search(rf"\b{word}\b", text)]
    lines += [f"from torch.distributed.tensor import {', '.join(placements)}"] if placements else []
    used = [word for word in ("ColwiseParallel", "RowwiseParallel", "SequenceParallel") if f"{word}(" in text]
    if used:
        lines += ["from torch.distributed.tensor.parallel import ("]
        lines += [f"    {word}," for word in [*used, "parallelize_module"]] + [")"]
    lines += ["from torch.utils.checkpoint import checkpoint"] if "partial(" in helpers else []
    return "\n".join([*lines, own])


def _fsdp_names(plan: LayerPlan, found: Translation) -> list[str]:
    names = ["fully_shard"]
    if any(group.settings.offload_parameters for group in _groups(found)):
        names.append("CPUOffloadPolicy")
    if _keeps_master(plan):
        names.append("MixedPrecisionPolicy")
    return sorted(names, key=lambda name: (name[0].islower(), name))


def _keeps_master(plan: LayerPlan) -> bool:
    return plan.optimizer == "adamw_mixed" and plan.model.dtype in ("bfloat16", "float16")


def _constants(plan: LayerPlan, found: Translation) -> str:
    settings = found.units[0].settings
    lines = [
        f"DATA_PARALLEL, TENSOR_PARALLEL, MICRO_BATCHES = "
        f"{settings.data_parallel}, {settings.tensor_parallel}, {plan.micro_batches}",
        f"SEED, STEPS = {plan.model.seed}, 5",
    ]
    once = _gathered_once(found)
    if plan.micro_batches > 1 and once:
        lines.append("GATHERED_ONCE = (")
        lines += [f'    "{path}",' for path in once] + [")"]
        lines.append('"""Modules whose parameters stay gathered until the last backward: ZeRO-2."""')
    return "\n".join(lines)


def _gathered_once(found: Translation) -> list[str]:
    return [group.modules[0] for group in _groups(found) if group.settings.sharding == "zero2"]


def _groups(found: Translation) -> Iterable[Group]:
    yield from (group for unit in found.units for group in unit.groups)
    yield from found.joined


def _build_model(plan: LayerPlan, module: Any) -> str:
    dtype = "" if plan.model.dtype == "float32" or _keeps_master(plan) else f".to(torch.{plan.model.dtype})"
    head = ["def build_model() -> nn.Module:", '    """Return the model, its parameters initialised."""']
    if not plan.model.source.startswith("hf:"):
        return "\n".join([*head, f"    return {_own_call(plan)}[0]{dtype}"])
    changed = {key: value for key, value in module.config.to_diff_dict().items() if key not in _NO_ARGUMENTS}
    lines = [f"    config = {type(module.config).__name__}("]
    lines += [f"        {key}={_literal(value)}," for key, value in changed.items()] + ["    )"]
    return "\n".join([*head, *lines, f"    return {type(module).__name__}(config){dtype}"])


def _literal(value: Any) -> str:
    return '"' + value + '"' if isinstance(value, str) and '"' not in value else repr(value)


def _own_call(plan: LayerPlan) -> str:
    given = function_options(ModelReference(**plan.model.model_dump()))
    return f"{plan.model.source.partition(':')[2]}({', '.join(f'{key}={value!r}' for key, value in given.items())})"


def _batch_of(step: TrainingStep) -> str:
    config: Any = step.module.config  # a family's model is one of transformers
    lines = []
    for name, value in step.example_kwargs.items():
        assert isinstance(value, Tensor)
        shape = tuple(value.shape)
        if value.is_floating_point():
            lines.append(f'        "{name}": torch.randn({shape}, generator=numbers),')
        else:
            limit = config.num_labels if len(shape) == 1 else config.vocab_size
            lines.append(f'        "{name}": torch.randint({limit}, {shape}, generator=numbers),')
    return "\n".join(
        [
            "def batch_of(step: int) -> dict[str, torch.Tensor]:",
            '    """Return the whole batch of a step: random numbers, in the place of data."""',
            "    numbers = torch.Generator().manual_seed(SEED + step)",
            "    return {",
            *lines,
            "    }",
        ]
    )


def _helpers(found: Translation) -> str:
    helpers = [_CHECKPOINTED] if any(unit.checkpoints for unit in found.units) else []
    helpers += [_ON_HOST] if any(unit.offloads for unit in found.units) else []
    helpers += [_REDISTRIBUTED] if found.sequence is not None else []
    return "\n\n".join(helper.strip("\n") + "\n" for helper in helpers)


def _style_texts(found: Translation) -> set[str]:
    return {_style(unit, style) for unit in found.units for style in unit.styles.values() if style != "gather"}


def _style(unit: UnitTranslation, style: str) -> str:
    return (_SEQUENCE_STYLES if unit.settings.sequence_parallel else _STYLES)[style]


def _parallelize(plan: LayerPlan, found: Translation) -> str:
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
        shape, mesh = f"({replicas}, {shards}, {plan.stage_devices // replicas // shards})", _mesh(replicas, shards)
        lines.append(f"{mesh} = init_device_mesh(device_type, {shape}, mesh_dim_names={names})")
        lines.append(f'{_data(replicas, shards)} = {mesh}["replicas", "shards"]')
    return lines


def _mesh_shapes(found: Translation) -> list[tuple[int, int]]:
    return sorted({(group.settings.replicas, group.settings.shards) for group in _groups(found)})


def _mesh(replicas: int, shards: int) -> str:
    return f"mesh_{replicas}x{shards}"


def _data(replicas: int, shards: int) -> str:
    return f"data_{replicas}x{shards}"


def _tensor_mesh(settings: LayerSettings) -> str:
    return f'{_mesh(settings.replicas, settings.shards)}["tensor"]'


def _tensor_lines(found: Translation) -> list[str]:
    lines: list[str] = []
    for units in _runs(found.units, lambda unit: (unit.settings, _inside(unit, unit.styles), len(unit.groups))):
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
    return [*lines, f"fully_shard(model, mesh={mesh}, reshard_after_forward=False)"]


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
    if _keeps_master(plan):
        arguments.append(
            f"mp_policy=MixedPrecisionPolicy(param_dtype=torch.{plan.model.dtype}, reduce_dtype=torch.float32)"
        )
    return f"fully_shard({', '.join(arguments)})"


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


def _main(plan: LayerPlan, found: Translation) -> str:
    accumulation = ""
    if plan.micro_batches > 1:
        accumulation = _ACCUMULATION + (_FREED_LAST if _gathered_once(found) else "")
    return _MAIN.format(optimizer=_optimizer(plan), accumulation=accumulation)


def _optimizer(plan: LayerPlan) -> str:
    used = HYPERPARAMETERS[plan.optimizer]
    arguments = f"model.parameters(), lr={used.lr}, foreach=False"  # meshes of parameters differ
    if plan.optimizer.startswith("adamw"):
        return f"torch.optim.AdamW({arguments}, weight_decay={used.weight_decay})"
    momentum = f", momentum={used.momentum}" if used.momentum else ""
    return f"torch.optim.SGD({arguments}{momentum})"
