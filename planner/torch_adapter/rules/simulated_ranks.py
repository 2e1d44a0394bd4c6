"""The ranks of a small mesh, simulated in one process: split tensors, run every rank, put results together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor

from planner.graph.placement import Placement, is_shard, shard_dim

_TIMEOUT_SECONDS = 30.0
_TOLERANCE = 2e-4
RunRank = Callable[[tuple[int, ...], "ThreadReducer"], tuple[Any, ...]]


class MismatchError(RuntimeError):
    """Simulated ranks that do not reproduce the whole tensors."""


def split(tensor: Tensor, placement: Placement, mesh: Sequence[int]) -> list[Tensor]:
    """A tensor's local parts, one per rank in row-major order; the first axis is the outermost."""
    parts = [tensor]
    for entry, count in zip(placement, mesh, strict=True):
        parts = [piece for part in parts for piece in _split(part, entry, count)]
    return parts


def _split(tensor: Tensor, entry: str, count: int) -> list[Tensor]:
    """Parts on one axis; a pending reduction gets random parts of mixed sign."""
    if is_shard(entry):
        dim = shard_dim(entry)
        if tensor.shape[dim] % count:
            raise MismatchError(f"dimension {dim} of {tuple(tensor.shape)} does not split into {count}")
        return [part.contiguous() for part in tensor.chunk(count, dim)]
    if entry == "R":
        return [tensor.clone() for _ in range(count)]
    generator = torch.Generator().manual_seed(2)
    noise = [_noise(tensor, generator) for _ in range(count)]
    if entry in ("Psum", "Pavg"):
        total = tensor if entry == "Psum" else tensor * count
        return [*noise[1:], total - sum(noise[1:])]
    owner = torch.randint(0, count, tensor.shape, generator=generator)
    sign = -1 if entry == "Pmax" else 1
    return [torch.where(owner == rank, tensor, tensor + sign * noise[rank].abs()) for rank in range(count)]


def _noise(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if tensor.dtype.is_floating_point:
        return torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
    return torch.randint(-3, 4, tensor.shape, generator=generator).to(tensor.dtype)


def join(parts: Sequence[Tensor], placement: Placement, mesh: Sequence[int]) -> Tensor:
    """The whole tensor from the local parts of all ranks; replicas must agree.

    Raises
    ------
    MismatchError
        If replicas differ.
    """
    merged = list(parts)
    for entry, count in zip(reversed(placement), reversed(mesh), strict=True):
        merged = [_join(merged[at : at + count], entry) for at in range(0, len(merged), count)]
    return merged[0]


def _join(parts: Sequence[Tensor], entry: str) -> Tensor:
    if is_shard(entry):
        return torch.cat(list(parts), shard_dim(entry))
    if entry == "R":
        for part in parts[1:]:
            compare(part, parts[0])
        return parts[0]
    stacked = torch.stack(list(parts))
    if entry == "Psum":
        return stacked.sum(0)
    if entry == "Pavg":
        return stacked.mean(0)
    return stacked.amax(0) if entry == "Pmax" else stacked.amin(0)


def compare(found: Tensor, expected: Tensor) -> None:
    """Compare two tensors.

    Raises
    ------
    MismatchError
        If shapes, dtypes or values (relative to the largest expected one) differ.
    """
    if found.shape != expected.shape or found.dtype != expected.dtype:
        raise MismatchError(f"{found.dtype} {tuple(found.shape)} instead of {expected.dtype} {tuple(expected.shape)}")
    if not expected.dtype.is_floating_point:
        if not torch.equal(found, expected):
            raise MismatchError("integers differ")
        return
    finite = expected.isfinite()
    if not torch.equal(found[~finite].nan_to_num(), expected[~finite].nan_to_num()):
        raise MismatchError("values that are not finite differ")
    difference, size = (found - expected)[finite].abs(), expected[finite].abs()
    if difference.numel() and not difference.max() <= _TOLERANCE * max(float(size.max()), 1e-3):
        raise MismatchError(f"values differ by {float(difference.max()):.3g}")


@dataclass
class _Board:
    """State that simulated ranks share: their tensors, and a barrier if they run at the same time."""

    slots: dict[tuple[int, ...], Tensor]
    barrier: threading.Barrier | None


class ThreadReducer:
    """All-reduce among simulated ranks that run in threads of this process.

    A rank that fails breaks the barrier, so that no other rank waits for it.
    """

    def __init__(self, mesh: Sequence[int], coordinate: tuple[int, ...], board: _Board) -> None:
        self.mesh, self.coordinate, self.board = tuple(mesh), coordinate, board

    def all_reduce(self, tensor: Tensor, op: str, axis: int) -> Tensor:
        """Reduction over one axis of the simulated mesh."""
        if self.board.barrier is None:
            raise MismatchError("a collective that was not declared")
        self.board.slots[self.coordinate] = tensor
        self.board.barrier.wait(_TIMEOUT_SECONDS)
        before, after = self.coordinate[:axis], self.coordinate[axis + 1 :]
        stacked = torch.stack([self.board.slots[(*before, at, *after)] for at in range(self.mesh[axis])])
        result = stacked.sum(0) if op == "sum" else stacked.amax(0)
        self.board.barrier.wait(_TIMEOUT_SECONDS)
        return result


def run_ranks(run: RunRank, mesh: Sequence[int], collectives: bool) -> list[tuple[Any, ...]]:
    """Run ``run(coordinate, reducer)`` on every simulated rank; results in row-major order.

    With ``collectives`` the ranks run at the same time, else one after another.

    Raises
    ------
    Exception
        The first error of a rank.
    """
    coordinates = list(product(*map(range, mesh)))
    board = _Board({}, threading.Barrier(prod(mesh)) if collectives else None)
    reducers = [ThreadReducer(mesh, coordinate, board) for coordinate in coordinates]
    if not collectives:
        return [run(coordinate, reducer) for coordinate, reducer in zip(coordinates, reducers, strict=True)]
    results: list[tuple[Any, ...] | None] = [None] * len(coordinates)
    errors: list[Exception] = []

    def work(at: int) -> None:
        try:
            results[at] = run(coordinates[at], reducers[at])
        except Exception as error:
            errors.append(error)
            assert board.barrier is not None
            board.barrier.abort()

    threads = [threading.Thread(target=work, args=(at,), daemon=True) for at in range(len(coordinates))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return [result for result in results if result is not None]
