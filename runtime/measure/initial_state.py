"""Initial parameters of a run: made once from the seed, written to a file, read by every rank in part.

Only the process that writes the file holds the whole model; a rank maps the file into memory and copies
its own blocks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from planner.graph.operator_graph import OperatorGraph, ValueRole
from planner.schedule.instructions import Schedule
from planner.torch_adapter.local.collectives import MeshGroups
from runtime.measure.local_shards import local_block

STATE_FILE = "state.pt"


@dataclass(frozen=True, eq=False)
class InitialState:
    """Global tensors of a file, mapped into memory and read where they are touched.

    Parameters
    ----------
    tensors
        Parameters and module buffers by their first name.
    examples
        Example tensors of the step's arguments by name.
    """

    tensors: Mapping[str, Tensor]
    examples: Mapping[str, Tensor]


def write_initial_state(folder: Path, module: nn.Module, examples: Mapping[str, Tensor]) -> None:
    """Write a module's parameters and buffers and the example tensors into ``folder``."""
    named = [*module.named_parameters(), *module.named_buffers()]
    save_tensors(
        folder / STATE_FILE,
        {
            **{f"state:{name}": tensor.detach() for name, tensor in named},
            **{f"example:{name}": tensor for name, tensor in examples.items()},
        },
    )


def read_initial_state(folder: Path) -> InitialState:
    """Map what :func:`write_initial_state` wrote."""
    parts: dict[str, dict[str, Tensor]] = {"state": {}, "example": {}}
    for key, tensor in map_tensors(folder / STATE_FILE).items():
        kind, _, name = key.partition(":")
        parts[kind][name] = tensor
    return InitialState(parts["state"], parts["example"])


def local_state(
    state: InitialState,
    constants: Mapping[str, Tensor],
    graph: OperatorGraph,
    schedule: Schedule,
    groups: MeshGroups,
    device: torch.device,
) -> dict[str, Tensor]:
    """Blocks of parameters, module buffers and constants that this rank holds under the schedule, by name."""
    local: dict[str, Tensor] = {}
    for value_index, buffer in zip(graph.inputs, schedule.inputs, strict=True):
        value = graph.values[value_index]
        if value.role in (ValueRole.PARAMETER, ValueRole.BUFFER):
            source = constants[value.name] if value.name in constants else state.tensors[value.name]
            block = local_block(source, schedule.buffers[buffer].placement, groups.shape, groups.coordinate)
            local[value.name] = copied(block, device)
    return local


def copied(block: Tensor, device: torch.device) -> Tensor:
    """Contiguous copy of a block on ``device``."""
    return torch.empty(block.shape, dtype=block.dtype, device=device).copy_(block)


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors so that :func:`map_tensors` reads them: completely or not at all."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        torch.save(dict(tensors), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)


def map_tensors(path: Path) -> dict[str, Tensor]:
    """Tensors of a file by name, mapped into memory: bytes are read where they are touched."""
    tensors: dict[str, Tensor] = torch.load(path, mmap=True, weights_only=True)
    return tensors
