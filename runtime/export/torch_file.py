"""Writes a layer plan as a Python file that needs torch and the model alone.

The file has ``build_model``, ``parallelize`` and a training loop on random tokens; a user takes ``parallelize`` to a
loop of their own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from textwrap import wrap
from typing import Any

from torch import Tensor

from planner.layers.plan.document import LayerPlan
from planner.models.references import TrainingStep, function_options, reference_of
from runtime.export.module_calls import groups, keeps_master, parallelize, precision, style_texts
from runtime.export.torch_snippets import ACCUMULATION, CHECKPOINTED, FREED_LAST, MAIN, ON_HOST, REDISTRIBUTED
from runtime.export.translation import Translation
from runtime.measure.optimizer import HYPERPARAMETERS

_NO_ARGUMENTS = ("transformers_version", "model_type", "architectures", "dtype", "torch_dtype")
"""Fields of a configuration that its class sets itself."""


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
        _docstring(plan, left_out, name) + "\n\n" + _imports(plan, step, found),
        _constants(plan, found),
        _build_model(plan, step.module),
        _batch_of(step),
        _helpers(found),
        parallelize(plan, found),
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
    helpers, styles = _helpers(found), style_texts(found)
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
    if any(group.settings.offload_parameters for group in groups(found)):
        names.append("CPUOffloadPolicy")
    if precision(plan):
        names.append("MixedPrecisionPolicy")
    return sorted(names, key=lambda name: (name[0].islower(), name))


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
    return [group.modules[0] for group in groups(found) if group.settings.sharding == "zero2"]


def _build_model(plan: LayerPlan, module: Any) -> str:
    dtype = "" if plan.model.dtype == "float32" or keeps_master(plan) else f".to(torch.{plan.model.dtype})"
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
    given = function_options(reference_of(plan.model))
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
    helpers = [CHECKPOINTED] if any(unit.checkpoints for unit in found.units) else []
    helpers += [ON_HOST] if any(unit.offloads for unit in found.units) else []
    helpers += [REDISTRIBUTED] if found.sequence is not None else []
    return "\n\n".join(helper.strip("\n") + "\n" for helper in helpers)


def _main(plan: LayerPlan, found: Translation) -> str:
    accumulation = ""
    if plan.micro_batches > 1:
        accumulation = ACCUMULATION + (FREED_LAST if _gathered_once(found) else "")
    return MAIN.format(optimizer=_optimizer(plan), accumulation=accumulation)


def _optimizer(plan: LayerPlan) -> str:
    used = HYPERPARAMETERS[plan.optimizer]
    arguments = f"model.parameters(), lr={used.lr}, foreach=False"  # meshes of parameters differ
    if plan.optimizer.startswith("adamw"):
        return f"torch.optim.AdamW({arguments}, weight_decay={used.weight_decay})"
    momentum = f", momentum={used.momentum}" if used.momentum else ""
    return f"torch.optim.SGD({arguments}{momentum})"
