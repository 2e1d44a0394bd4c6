"""Batches of the user, and this rank's share of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from planner.graph.operator_graph import OperatorGraph, ValueRole
from planner.graph.placement import REPLICATE, Placement, block_index, is_shard, local_shape, shard_dim
from planner.schedule.instructions import Schedule
from runtime.library.errors import BatchError
from runtime.measure.local_shards import local_block

Batch = Mapping[str, Tensor] | Sequence[Tensor] | Tensor
"""Tensors of a batch by name, in the order of the step's arguments, or the only one."""


@dataclass(frozen=True, slots=True)
class BatchTensor:
    """A tensor of the batch: its global shape, dtype and placement."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placement: Placement


class BatchShares:
    """Which part of a batch this rank reads.

    Parameters
    ----------
    tensors
        Those that the step reads.
    names
        Tensors of the step's arguments in order, those that take no part in the step included.
    mesh, coordinate
        Size of each mesh axis, and the position of this rank on it.
    accumulate
        Micro-batches of a batch, each of the tensors' shapes. Every block of the batch that a rank reads is cut into
        them, so a micro-batch has some rows of each.

    Attributes
    ----------
    tensors
        Those that the step reads, by name.
    rows
        Rows of the global batch that any tensor of this rank comes from; all of them where a tensor is not sharded by
        rows, or the tensors differ.
    batch_size
        Rows of the global batch.
    """

    def __init__(
        self,
        tensors: Iterable[BatchTensor],
        names: Sequence[str],
        mesh: Sequence[int],
        coordinate: Sequence[int],
        accumulate: int = 1,
    ) -> None:
        self.names = tuple(names)
        self._accumulate = accumulate
        self._mesh, self._coordinate = tuple(mesh), tuple(coordinate)
        self.tensors = {entry.name: entry for entry in tensors}
        found = self.tensors.values()
        sizes = {entry.shape[0] if entry.shape else 0 for entry in found}
        self._micro_size = sizes.pop() if len(sizes) == 1 else 0
        self.batch_size = self._micro_size * accumulate
        blocks = {self._rows(entry) for entry in found} if self._micro_size else set()
        self._fewest = min(map(len, blocks), default=1)
        own = blocks.pop() if len(blocks) == 1 else range(self._micro_size)
        self.rows = range(own.start * accumulate, own.stop * accumulate)

    @classmethod
    def of_schedule(
        cls,
        graph: OperatorGraph,
        schedule: Schedule,
        names: Sequence[str],
        coordinate: Sequence[int],
        accumulate: int = 1,
    ) -> BatchShares:
        """Shares of the rank at a coordinate in the batch of a traced step."""
        tensors = [
            BatchTensor(
                graph.values[value].name,
                graph.values[value].spec.shape,
                getattr(torch, graph.values[value].spec.dtype),
                schedule.buffers[buffer].placement,
            )
            for value, buffer in zip(graph.inputs, schedule.inputs, strict=True)
            if graph.values[value].role is ValueRole.INPUT
        ]
        return cls(tensors, names, schedule.mesh, coordinate, accumulate)

    def blocks(self, batch: Batch) -> dict[str, Tensor]:
        """Blocks of this rank of every tensor that the step reads, by name; views where possible.

        Parameters
        ----------
        batch
            Each tensor is global, or the :attr:`rows` of the global one, or already this rank's block.

        Raises
        ------
        BatchError
            A tensor is missing, is not one of the step's, or has another shape or dtype.
        """
        given = self._named(batch)
        return {name: self._block(entry, given[name]) for name, entry in self.tensors.items()}

    def micro_batches(self, batch: Batch) -> list[dict[str, Tensor]]:
        """As :meth:`blocks`, for each micro-batch."""
        if self._accumulate == 1:
            return [self.blocks(batch)]
        given = self._named(batch)
        cut = {name: self._cut(entry, given[name]) for name, entry in self.tensors.items()}
        return [self.blocks({name: parts[at] for name, parts in cut.items()}) for at in range(self._accumulate)]

    def global_tensors(self, batch: Batch) -> dict[str, Tensor]:
        """Tensors of a batch that have all rows, by name; none where the step refuses the batch."""
        try:
            given = self._named(batch)
        except BatchError:
            return {}
        wanted = {
            name: (entry.shape[0] * self._accumulate if entry.shape else 0) for name, entry in self.tensors.items()
        }
        tensors = {name: given[name] for name in wanted if isinstance(given[name], Tensor) and given[name].ndim}
        return {name: tensor for name, tensor in tensors.items() if len(tensor) == wanted[name]}

    def _cut(self, entry: BatchTensor, tensor: Tensor) -> list[Tensor]:
        """Micro-batches of a tensor that has all rows or this rank's."""
        if not isinstance(tensor, Tensor) or not tensor.ndim or len(tensor) not in (self.batch_size, len(self.rows)):
            shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
            raise BatchError(
                f"{entry.name} of the batch has shape {shape}: {self._accumulate} micro-batches of {entry.shape} have "
                f"{self.batch_size} rows, this rank's share {len(self.rows)}"
            )
        cut = tensor.view(-1, self._accumulate, self._fewest, *tensor.shape[1:])
        return [cut[:, at].flatten(0, 1) for at in range(self._accumulate)]

    def _named(self, batch: Batch) -> Mapping[str, Tensor]:
        wanted = ", ".join(self.names)
        if isinstance(batch, Tensor):
            batch = (batch,)
        if not isinstance(batch, Mapping):
            if len(batch) != len(self.names):
                raise BatchError(f"the batch has {len(batch)} tensors, the step takes {len(self.names)}: {wanted}")
            batch = dict(zip(self.names, batch, strict=True))
        missing = [name for name in self.tensors if name not in batch]
        unknown = [str(name) for name in batch if name not in self.names]
        if missing or unknown:
            wrong = (
                f"lacks {', '.join(missing)}" if missing else f"has {', '.join(unknown)}, which the step does not take"
            )
            raise BatchError(f"the batch {wrong}: it takes {wanted}")
        return batch

    def _block(self, entry: BatchTensor, tensor: Tensor) -> Tensor:
        if not isinstance(tensor, Tensor):
            raise BatchError(f"{entry.name} of the batch is a {type(tensor).__name__}: give a tensor")
        if tensor.dtype != entry.dtype:
            raise BatchError(f"{entry.name} of the batch has {tensor.dtype}, planned is {entry.dtype}: convert it")
        shape, local = tuple(tensor.shape), local_shape(entry.shape, entry.placement, self._mesh)
        if shape == entry.shape:
            return local_block(tensor, entry.placement, self._mesh, self._coordinate)
        if shape == local:
            return tensor
        rows = (len(self.rows) // self._accumulate, *entry.shape[1:])
        if self.batch_size and shape == rows:
            rest = tuple(REPLICATE if is_shard(part) and shard_dim(part) == 0 else part for part in entry.placement)
            return local_block(tensor, rest, self._mesh, self._coordinate)
        shares = f", or this rank's share of {rows}" if self.batch_size and rows != entry.shape else ""
        raise BatchError(
            f"{entry.name} of the batch has shape {shape}, planned is {entry.shape}{shares}: plan with the batch and "
            "sequence that you train with, pad, and drop the last incomplete batch"
        )

    def _rows(self, entry: BatchTensor) -> range:
        size = local_shape(entry.shape, entry.placement, self._mesh)[0]
        first = size * block_index(self._coordinate, entry.placement, self._mesh, 0)
        return range(first, first + size)
