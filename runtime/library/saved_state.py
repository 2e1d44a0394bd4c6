"""Tensors and settings of a step as a checkpoint holds them: blocks of the model's tensors, whatever the plan.

Names are ``model.NAME``, ``master.NAME`` and ``optimizer.KEY.NAME`` with a parameter's or buffer's first name. A file
of tensors holds some blocks of them; where it holds several of one name, their offsets are behind it: ``NAME@0,32``.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from runtime.job.process_group import gather_texts
from runtime.library.errors import CheckpointError
from runtime.measure.local_shards import Block

if TYPE_CHECKING:
    from runtime.library.step import Step

_IMPLEMENTATION = ("params", "param_names", "foreach", "fused", "one_by_one", "capturable", "differentiable")
"""Settings of an optimizer that say how it computes, not what: the new process's own stay."""
_OFFSETS_KEY = "DCP_SHARDING_INFO"
_SEVERAL = re.compile(r"(.*)@(?:\d+,)*\d+")


@dataclass(frozen=True, slots=True)
class SavedBlock:
    """A block of a tensor of a checkpoint: its key, place, and values, which lie as in the model."""

    key: str
    block: Block
    tensor: Tensor

    @property
    def own_key(self) -> str:
        """The key with the block's offsets."""
        return f"{self.key}@{','.join(map(str, self.block.offsets))}" if self.block.offsets else self.key


def saved_blocks(step: Step) -> dict[str, SavedBlock]:
    """All tensors of a step by their own keys: parameters and buffers, master copies, and the optimizer's state.

    Where this rank has a block twice, one of them counts.
    """
    return {entry.own_key: entry for entry in _blocks(step) if not entry.block.is_empty}


def _blocks(step: Step) -> Iterator[SavedBlock]:
    def saved(kind: str, path: str, tensor: Tensor) -> SavedBlock:
        block = step.blocks[path]
        return SavedBlock(f"{kind}.{block.name}", block, block.of(tensor.detach()))

    for path, tensor in step.state.items():
        yield saved("model", path, tensor)
    for path, tensor in step.updates.masters.items():
        yield saved("master", path, tensor)
    for path, parameter in step.updates.parameters.items():
        for key, value in step.optimizer.state.get(parameter, {}).items():
            if not isinstance(value, Tensor):
                continue
            if value.shape == parameter.shape:
                yield saved(f"optimizer.{key}", path, value)
            else:
                name, shape = step.blocks[path].name, tuple(value.shape)
                yield SavedBlock(f"optimizer.{key}.{name}", Block(name, shape, (0,) * len(shape), shape), value)


def scalars_of(step: Step) -> dict[str, dict[str, Any]]:
    """State of the optimizer that is no tensor, by the model's parameter."""
    found = {}
    for path, parameter in step.updates.parameters.items():
        state = step.optimizer.state.get(parameter, {})
        values = {key: value for key, value in state.items() if not isinstance(value, Tensor)}
        if values:
            found[step.blocks[path].name] = values
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


class SavedTensors:
    """Tensors of a checkpoint's files.

    Parameters
    ----------
    path
        The checkpoint's folder.
    stack
        Closes the files.

    Attributes
    ----------
    shapes, dtypes
        Of the whole tensors, by key.
    """

    def __init__(self, path: Path, stack: ExitStack) -> None:
        from safetensors import safe_open

        self._blocks: dict[str, list[tuple[Any, str, Block]]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for file in sorted(path.glob("*.safetensors")):
            opened = stack.enter_context(safe_open(file, framework="pt"))
            offsets = json.loads(opened.metadata()[_OFFSETS_KEY])
            for own_key in opened.keys():  # noqa: SIM118  # it is no mapping
                several = _SEVERAL.fullmatch(own_key)
                key = several[1] if several else own_key
                described = opened.get_slice(own_key)
                first, sizes = tuple(offsets[own_key]["saved_offsets"]), tuple(described.get_shape())
                ends = tuple(a + b for a, b in zip(first, sizes, strict=True))
                known = self.shapes.get(key, ends)
                self.shapes[key] = tuple(map(max, known, ends))
                if key not in self.dtypes:
                    self.dtypes[key] = described[tuple(slice(0) for _ in sizes)].dtype if sizes else torch.float32
                self._blocks.setdefault(key, []).append((opened, own_key, Block(key, (), first, sizes)))

    def read(self, key: str, block: Block, into: Tensor) -> None:
        """Copy a block of a tensor into another one; its bytes alone are read.

        Raises
        ------
        ValueError
            The files do not have all of it.
        """
        copied = 0
        for file, own_key, saved in self._blocks.get(key, ()):
            firsts = list(map(max, block.offsets, saved.offsets))
            ends = [
                min(first + size, other + length)
                for first, size, other, length in zip(
                    block.offsets, block.sizes, saved.offsets, saved.sizes, strict=True
                )
            ]
            if any(first >= end for first, end in zip(firsts, ends, strict=True)):
                continue
            here = tuple(slice(f - o, e - o) for f, e, o in zip(firsts, ends, block.offsets, strict=True))
            there = tuple(slice(f - o, e - o) for f, e, o in zip(firsts, ends, saved.offsets, strict=True))
            part = file.get_slice(own_key)[there] if there else file.get_tensor(own_key)
            into[here].copy_(part)
            copied += part.numel()
        if copied != prod(block.sizes):
            raise ValueError(f"{key} is not there completely")


def read_tensors(step: Step, path: Path, loop: dict[str, Any]) -> None:
    """Read a step's tensors in place, and the optimizer's state anew; a collective of all ranks.

    Raises
    ------
    CheckpointError
        A tensor is missing or has another shape; the step is unchanged.
    """
    with ExitStack() as stack:
        try:
            saved = SavedTensors(path, stack)
        except Exception as error:
            raise CheckpointError(f"checkpoint {path} cannot be read: {reason_of(error)}") from error
        wanted = [entry for entry in _blocks(step) if not entry.key.startswith("optimizer.")]
        wanted = [entry for entry in wanted if entry.key in saved.shapes or not _may_be_missing(step, entry)]
        for entry in wanted:
            size = saved.shapes.get(entry.key)
            if size != entry.block.shape:
                name = entry.block.name
                raise CheckpointError(
                    f"checkpoint {path} has {'no ' + name if size is None else f'{name} of shape {size}'}, the model "
                    f"{entry.block.shape}: it is of another model"
                )
        states, made = _optimizer_state(step, path, loop, saved)
        failure = ""
        try:
            with torch.no_grad():
                for entry in (*wanted, *made):
                    if not entry.block.is_empty:
                        saved.read(entry.key, entry.block, entry.tensor)
        except Exception as error:
            failure = reason_of(error)
    failure = next(filter(None, gather_texts(failure)), "")
    if failure:
        raise CheckpointError(f"checkpoint {path} cannot be read: {failure}")
    step.optimizer.state.clear()
    for name, state in states.items():
        step.optimizer.state[step.updates.parameters[name]] = state


def _may_be_missing(step: Step, entry: SavedBlock) -> bool:
    """Whether a tensor is a buffer that the model does not save, or one without entries."""
    return entry.block.name not in step.saved_names.values() or 0 in entry.block.shape


def _optimizer_state(
    step: Step, path: Path, loop: dict[str, Any], saved: SavedTensors
) -> tuple[dict[str, dict[str, Any]], list[SavedBlock]]:
    """State of the optimizer by this rank's parameters, and the blocks of it that are to be read."""
    paths: dict[str, list[str]] = {}
    for own in step.updates.parameters:
        paths.setdefault(step.blocks[own].name, []).append(own)
    trained = {name for _, names in step.updates.groups() for name in names}
    states: dict[str, dict[str, Any]] = {
        own: dict(values) for name, values in loop["scalars"].items() for own in paths.get(name, ())
    }
    made = []
    for entry, shape in saved.shapes.items():
        kind, _, rest = entry.partition(".")
        key, _, name = rest.partition(".")
        if kind != "optimizer":
            continue
        if name not in trained:
            raise CheckpointError(
                f"checkpoint {path} has an optimizer's state of {name}, which the step does not train"
            )
        for own in paths.get(name, ()):
            parameter, block = step.updates.parameters[own], step.blocks[own]
            like = shape == block.shape
            device = parameter.device if like or step.runs_on_device else torch.device("cpu")
            local = torch.zeros(parameter.shape if like else shape, dtype=saved.dtypes[entry], device=device)
            states.setdefault(own, {})[key] = local
            place = block if like else replace(block, shape=shape, offsets=(0,) * len(shape), sizes=shape)
            made.append(SavedBlock(entry, place, place.of(local)))
    return states, made


def reason_of(error: BaseException) -> str:
    """First line of the innermost cause."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no message'])[-1]}"


def random_state() -> dict[str, Any]:
    """States of the generators of Python, NumPy and torch, on the CPU, in plain values."""
    kind, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  what users' augmentations draw from
    return {
        "python": random.getstate(),
        "numpy": [str(kind), np.asarray(keys).tolist(), *rest],
        "torch": torch.get_rng_state(),
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Set what :func:`random_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
