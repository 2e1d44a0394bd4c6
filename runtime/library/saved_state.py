"""Tensors and settings of a step as a checkpoint holds them: DTensors under the plan's placements, which reshard.

Names are ``model.NAME``, ``master.NAME`` and ``optimizer.KEY.NAME`` with a parameter's or buffer's first name.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from runtime.library.errors import CheckpointError

if TYPE_CHECKING:
    from runtime.library.step import Step

_IMPLEMENTATION = ("params", "param_names", "foreach", "fused", "capturable", "differentiable")
"""Settings of an optimizer that say how it computes, not what: the new process's own stay."""


def tensors_of(step: Step) -> dict[str, Tensor]:
    """All tensors of a step: parameters and buffers, master copies, and the optimizer's state."""
    found: dict[str, Tensor] = {
        f"model.{name}": step.as_dtensor(name, tensor)
        for name, tensor in step.training.state.items()
        if name not in step.constants
    }
    found |= {f"master.{name}": step.as_dtensor(name, tensor) for name, tensor in step.updates.masters.items()}
    for name, parameter in step.updates.parameters.items():
        for key, value in step.optimizer.state.get(parameter, {}).items():
            if isinstance(value, Tensor):
                like = value.shape == parameter.shape
                found[f"optimizer.{key}.{name}"] = step.as_dtensor(name, value) if like else value
    return found


def scalars_of(step: Step) -> dict[str, dict[str, Any]]:
    """State of the optimizer that is no tensor, by parameter."""
    found = {}
    for name, parameter in step.updates.parameters.items():
        state = step.optimizer.state.get(parameter, {})
        values = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        if values:
            found[name] = values
    return found


def settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """What a group of an optimizer sets, its parameters left out."""
    return {key: value for key, value in group.items() if key not in _IMPLEMENTATION}


def matching_groups(path: Path, step: Step, loop: dict[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Groups of the step's optimizer, each with the settings that were saved.

    Raises
    ------
    CheckpointError
        The groups hold other parameters.
    """
    here, saved = step.updates.groups(), loop["groups"]
    if [sorted(names) for _, names in here] != [sorted(group.pop("names")) for group in saved]:
        raise CheckpointError(
            f"checkpoint {path} has its parameters in {len(saved)} groups of the optimizer, the step has others in "
            f"{len(here)}: make the optimizer as it was"
        )
    return list(zip((group for group, _ in here), saved, strict=True))


def read_tensors(step: Step, path: Path, loop: dict[str, Any]) -> None:
    """Read a step's tensors in place, and the optimizer's state anew; a collective of all ranks.

    Raises
    ------
    CheckpointError
        A tensor is missing or has another shape; the step is unchanged.
    """
    try:
        described = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    except Exception as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {reason_of(error)}") from error
    saved = {key: entry for key, entry in described.items() if isinstance(entry, TensorStorageMetadata)}
    wanted = {key: value for key, value in tensors_of(step).items() if not key.startswith("optimizer.")}
    for key, tensor in wanted.items():
        size = tuple(saved[key].size) if key in saved else None
        if size != tuple(tensor.shape):
            _, _, name = key.partition(".")
            raise CheckpointError(
                f"checkpoint {path} has {'no ' + name if size is None else f'{name} of shape {size}'}, the model "
                f"{tuple(tensor.shape)}: it is of another model"
            )
    states: dict[str, dict[str, Any]] = {name: dict(values) for name, values in loop["scalars"].items()}
    for entry, found in saved.items():
        kind, _, rest = entry.partition(".")
        key, _, name = rest.partition(".")
        if kind != "optimizer":
            continue
        parameter = step.updates.parameters.get(name)
        if parameter is None:
            raise CheckpointError(
                f"checkpoint {path} has an optimizer's state of {name}, which the step does not train"
            )
        like = tuple(found.size) == step.shapes[name]
        device = parameter.device if like or step.runs_on_device else torch.device("cpu")
        local = torch.zeros(parameter.shape if like else found.size, dtype=found.properties.dtype, device=device)
        states.setdefault(name, {})[key] = local
        wanted[entry] = step.as_dtensor(name, local) if like else local
    try:
        load(wanted, storage_reader=HuggingFaceStorageReader(str(path)))
    except Exception as error:
        raise CheckpointError(f"checkpoint {path} cannot be read: {reason_of(error)}") from error
    step.optimizer.state.clear()
    for name, state in states.items():
        step.optimizer.state[step.updates.parameters[name]] = state


def reason_of(error: BaseException) -> str:
    """First line of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[-1]}"
