"""Local shards as DTensors under the plan's placements, and a module made of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from planner.graph.placement import REPLICATE, Placement, is_shard, shard, shard_dim


def as_dtensor(local: Tensor, placement: Placement, shape: tuple[int, ...], mesh: DeviceMesh) -> DTensor:
    """DTensor over a local shard, whose storage it shares; nothing is sent."""
    stride = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    placements = [Shard(shard_dim(entry)) if is_shard(entry) else Replicate() for entry in placement]
    found: DTensor = DTensor.from_local(
        local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
    return found


def placement_of(tensor: DTensor) -> Placement:
    """Placement of a DTensor that :func:`as_dtensor` made."""
    return tuple(shard(entry.dim) if isinstance(entry, Shard) else REPLICATE for entry in tensor.placements)


def put_into(module: nn.Module, tensors: Mapping[str, Tensor], aliases: Mapping[str, Iterable[str]]) -> None:
    """Replace parameters and buffers of a module by others, in place.

    Parameters
    ----------
    module
        The module.
    tensors
        By first name.
    aliases
        Further names of the same tensor.
    """
    for name, tensor in tensors.items():
        made: Tensor | None = None
        for path in (name, *aliases.get(name, ())):
            owner_path, _, leaf = path.rpartition(".")
            owner = module.get_submodule(owner_path)
            found = getattr(owner, leaf)
            if isinstance(found, nn.Parameter):
                made = made if made is not None else nn.Parameter(tensor, requires_grad=found.requires_grad)
                setattr(owner, leaf, made)
            else:
                setattr(owner, leaf, tensor)
