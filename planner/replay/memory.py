"""Memory over time of a replayed schedule, from the lifetimes of its buffers.

A buffer of a non-view instruction owns a storage; views and reductions in place alias the storage of their source, and
a storage lives as long as any buffer that aliases it. All shards are even, so every device holds the same bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from planner.graph.last_reads import OUTPUT, last_reads
from planner.graph.operator_graph import OperatorGraph, OutputRole, TensorSpec, ValueRole
from planner.graph.operator_workspaces import workspace_item_bytes
from planner.graph.optimizers import OptimizerSpec
from planner.graph.placement import Placement, divides, is_outermost, local_numel, local_shape, reordered
from planner.graph.view_chains import view_chains
from planner.replay.report import AliveTensor, Category, HostUse, MemoryProfile
from planner.replay.wording import Wording
from planner.schedule.instructions import (
    Compute,
    Free,
    Instruction,
    Offload,
    Prefetch,
    Reshard,
    Schedule,
    Update,
    buckets,
    sends_copy,
    waits,
)

_INPUT_CATEGORY = {ValueRole.PARAMETER: Category.PARAMETERS, ValueRole.BUFFER: Category.MODULE_BUFFERS}


@dataclass(frozen=True, slots=True)
class OptimizerMemory:
    """Bytes of an optimizer's state, and of the workspace of one update; parameters are updated one by one.

    Parameters
    ----------
    spec
        Tensors of a parameter's local size.
    """

    spec: OptimizerSpec

    def state_bytes(self, parameter: TensorSpec, local_numel: int) -> int:
        """Bytes that live for the whole step."""
        return self.spec.state(parameter.dtype).nbytes(local_numel)

    def workspace_bytes(self, parameter: TensorSpec, gradient: TensorSpec, local_numel: int) -> int:
        """Bytes that live only while the parameter is updated."""
        return self.spec.workspace(parameter.dtype, gradient.dtype, gradient.is_contiguous).nbytes(local_numel)


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Lifetime of every buffer, and the buffer that owns its storage (-1: never created).

    ``created`` is the index of the creating instruction, -1 for inputs. ``freed`` is that of the freeing
    instruction, the number of instructions where it never is. ``on_host`` marks buffers in host memory.
    """

    root: NDArray[np.int64]
    created: NDArray[np.int64]
    freed: NDArray[np.int64]
    on_host: NDArray[np.bool_]


class LocalBytes:
    """Bytes of a value on one device, memoised; 0 where the placement is not lawful."""

    def __init__(self, graph: OperatorGraph, mesh: tuple[int, ...]) -> None:
        self._values = graph.values
        self._mesh = mesh
        self._known: dict[tuple[int, Placement], int] = {}

    def __call__(self, value: int, placement: Placement) -> int:
        """Bytes of ``value`` under ``placement``."""
        return self.numel(value, placement) * self._values[value].spec.item_bytes

    def along(self, value: int, path: Sequence[Placement]) -> tuple[list[Placement], list[tuple[int, ...]], list[int]]:
        """Placements, local shapes and bytes along a path, all in the order of memory, where it is lawful."""
        spec = self._values[value].spec
        order = spec.memory_order
        lying = [reordered(placement, order) for placement in path]
        if not all(self.numel(value, placement) for placement in path):
            return lying, [(0,) * len(order)] * len(path), [0] * len(path)
        whole = tuple(spec.shape[dim] for dim in order)
        shapes = [local_shape(whole, placement, self._mesh) for placement in lying]
        return lying, shapes, [self(value, placement) for placement in path]

    def numel(self, value: int, placement: Placement) -> int:
        """Elements of ``value`` under ``placement``."""
        key = (value, placement)
        if key not in self._known:
            shape = self._values[value].spec.shape
            is_lawful = len(placement) == len(self._mesh) and divides(shape, placement, self._mesh)
            self._known[key] = local_numel(shape, placement, self._mesh) if is_lawful else 0
        return self._known[key]


def path_peak(
    path: Sequence[Placement], shapes: Sequence[tuple[int, ...]], sizes: Sequence[int], source: int = 0
) -> int:
    """Most bytes alive while a path runs.

    The peak of each collective is in the table of :mod:`planner.machine.resharding`; this is a second implementation
    of it. The output of a step stays until the next one is done.

    Parameters
    ----------
    path
        Placements in the order of memory.
    shapes, sizes
        Local shapes and bytes along the path.
    source
        Bytes of the source's storage where it ends with the first step; 0 where it does not, and is not counted.
    """
    peak, held = 0, source
    for at, ((old, new), (split, joined), (before, after)) in enumerate(
        zip(pairwise(path), pairwise(shapes), pairwise(sizes), strict=True)
    ):
        was, becomes = next(((a, b) for a, b in zip(old, new, strict=True) if a != b), ("R", "R"))
        extra = 0
        if at and was[0] == "P" and becomes == "R":
            continue  # reduced in place
        splits = becomes[0] == "S" and was != "R" and not is_outermost(becomes, split)
        if was[0] == "S" and (splits or not is_outermost(was, joined)):
            extra = after
        elif was[0] == "P" and splits:
            extra = before
        peak = max(peak, held + extra + after)
        held = after
    return peak


def memory_profile(
    graph: OperatorGraph,
    schedule: Schedule,
    lifetimes: Lifetimes,
    local_bytes: LocalBytes,
    optimizer: OptimizerMemory,
    device: str,
    releases_sources: bool,
) -> tuple[MemoryProfile, int, int, tuple[AliveTensor, ...]]:
    """Bytes over time, the peak, the first instruction that reaches it (-1: the start), tensors alive then."""
    count = len(schedule.instructions)
    path_ends = released_on_the_way(graph, schedule, lifetimes) if releases_sources else {}
    owners, sizes, ends = _storages(schedule, lifetimes, local_bytes, path_ends)
    categories = _categories(graph, schedule, lifetimes)
    starts = lifetimes.created[owners]
    states = _optimizer_states(graph, schedule, local_bytes, optimizer)
    at_start, after = {}, {}
    for category in Category:
        mine = np.array([categories[owner] is category for owner in owners], dtype=bool)
        change = np.zeros(count + 2, dtype=np.int64)
        np.add.at(change, starts[mine] + 1, sizes[mine])
        np.add.at(change, ends[mine] + 1, -sizes[mine])
        held = np.cumsum(change)[: count + 1]
        if category is Category.OPTIMIZER:
            held += sum(tensor.nbytes for tensor in states)
        at_start[category], after[category] = int(held[0]), held[1:]
    transient = {category: np.zeros(count, dtype=np.int64) for category in Category}
    released = dict(zip(ends.tolist(), sizes.tolist(), strict=True))
    for index, instruction in enumerate(schedule.instructions):
        category = Category.RESHARDED if isinstance(instruction, Reshard) else Category.WORKSPACE
        source = released.get(index, 0)
        transient[category][index] += _transient(graph, schedule, instruction, local_bytes, optimizer, device, source)
    joined_parts, arrivals = buckets(schedule.instructions), waits(schedule.instructions)
    bucketed = {at for bucket in joined_parts for at in bucket}
    for start, wait in arrivals.items():
        if start not in bucketed:
            sent, joined = _beside(schedule, start, local_bytes)
            transient[Category.RESHARDED][start:wait] += sent
            transient[Category.RESHARDED][wait] += max(sent, joined)
    for joined_at in joined_parts.items():
        _add_flat_buffers(transient[Category.RESHARDED], schedule, joined_at, arrivals, local_bytes)
    profile = MemoryProfile(at_start, after, transient)
    during = profile.total_during
    peak, at = sum(at_start.values()), -1
    if count and int(during.max()) > peak:
        at = int(during.argmax())
        peak = int(during[at])
    tensors = tensor_lifetimes(graph, schedule, lifetimes, local_bytes, optimizer, path_ends)
    alive = [tensor for tensor, created, freed in tensors if created <= at < freed]
    alive += _alive_transients(graph, schedule, transient, at)
    return profile, peak, at, tuple(sorted(alive, key=lambda tensor: -tensor.nbytes))


def tensor_lifetimes(
    graph: OperatorGraph,
    schedule: Schedule,
    lifetimes: Lifetimes,
    local_bytes: LocalBytes,
    optimizer: OptimizerMemory,
    path_ends: Mapping[int, int],
) -> list[tuple[AliveTensor, int, int]]:
    """Storages on the device with the instructions that create them and free their last alias.

    They are as in :class:`Lifetimes`, ``path_ends`` as :func:`released_on_the_way` finds them. What one instruction
    holds only while it runs is left out.
    """
    categories = _categories(graph, schedule, lifetimes)
    found = [
        (state, -1, len(schedule.instructions)) for state in _optimizer_states(graph, schedule, local_bytes, optimizer)
    ]
    for owner, size, end in zip(*_storages(schedule, lifetimes, local_bytes, path_ends), strict=True):
        entry, name = schedule.buffers[owner], graph.values[schedule.buffers[owner].value].name
        tensor = AliveTensor(name, int(size), entry.placement, categories[owner], int(owner))
        found.append((tensor, int(lifetimes.created[owner]), int(end)))
    return found


def host_use(schedule: Schedule, lifetimes: Lifetimes, local_bytes: LocalBytes) -> HostUse:
    """Bytes of host buffers over time and of the copies that make and read them."""
    count = len(schedule.instructions)
    owners, sizes, ends = _storages(schedule, lifetimes, local_bytes, {}, on_host=True)
    change = np.zeros(count + 1, dtype=np.int64)
    np.add.at(change, lifetimes.created[owners], sizes)
    np.add.at(change, ends, -sizes)
    after = np.cumsum(change)[:count]
    at = int(after.argmax()) if owners.size else -1
    copied = {Offload: 0, Prefetch: 0}
    for instruction in schedule.instructions:
        if isinstance(instruction, (Offload, Prefetch)):
            entry = schedule.buffers[instruction.source]
            copied[type(instruction)] += local_bytes(entry.value, entry.placement)
    return HostUse(after, int(after[at]) if at >= 0 else 0, at, copied[Offload], copied[Prefetch])


def _optimizer_states(
    graph: OperatorGraph, schedule: Schedule, local_bytes: LocalBytes, optimizer: OptimizerMemory
) -> list[AliveTensor]:
    """State of the optimizer, one entry per trainable parameter."""
    states = []
    for index, buffer in zip(graph.inputs, schedule.inputs, strict=True):
        value, placement = graph.values[index], schedule.buffers[buffer].placement
        nbytes = optimizer.state_bytes(value.spec, local_bytes.numel(index, placement)) if value.trainable else 0
        if nbytes:
            name = f"{optimizer.spec.name} state of {value.name}"
            states.append(AliveTensor(name, nbytes, placement, Category.OPTIMIZER, None))
    return states


def _alive_transients(
    graph: OperatorGraph, schedule: Schedule, transient: dict[Category, NDArray[np.int64]], at: int
) -> list[AliveTensor]:
    if at < 0:
        return []
    name = f"during {Wording(graph, schedule).instruction(schedule.instructions[at])}"
    return [AliveTensor(name, int(held[at]), (), category, None) for category, held in transient.items() if held[at]]


def _storages(
    schedule: Schedule,
    lifetimes: Lifetimes,
    local_bytes: LocalBytes,
    path_ends: Mapping[int, int],
    *,
    on_host: bool = False,
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Buffers that own a storage there, its bytes, and the instruction with which it ends.

    That is the one that frees its last alias, or that of ``path_ends``.
    """
    existing = np.flatnonzero(lifetimes.root >= 0)
    last = _last_uses(schedule, lifetimes)
    for owner, at in path_ends.items():
        last[owner] = at
    owners = existing[(lifetimes.root[existing] == existing) & (lifetimes.on_host[existing] == on_host)]
    entries = [schedule.buffers[owner] for owner in owners]
    sizes = np.array([local_bytes(entry.value, entry.placement) for entry in entries], dtype=np.int64)
    return owners, sizes, last[owners]


def _last_uses(schedule: Schedule, lifetimes: Lifetimes) -> NDArray[np.int64]:
    """By the buffer that owns a storage, the instruction that frees the last alias."""
    existing = np.flatnonzero(lifetimes.root >= 0)
    last = np.full(len(schedule.buffers), -1, dtype=np.int64)
    np.maximum.at(last, lifetimes.root[existing], lifetimes.freed[existing])
    return last


def released_on_the_way(graph: OperatorGraph, schedule: Schedule, lifetimes: Lifetimes) -> dict[int, int]:
    """Storages that end with the first step of a path of several, by their owners: the path's instruction.

    Nothing reads them later. Only readers that are the last ones in every plan count; with others the source is counted
    throughout the path, since the model counts the same bytes whatever runs again.
    """
    last = _last_uses(schedule, lifetimes)
    found, follows, reader = [], len(schedule.instructions), OUTPUT
    for at in range(follows - 1, -1, -1):
        instruction = schedule.instructions[at]
        if isinstance(instruction, Free):
            continue
        if isinstance(instruction, Compute) and not graph.operators[instruction.operator].is_view:
            reader = instruction.operator
        if isinstance(instruction, Reshard) and len(instruction.path) > 2:
            owner = int(lifetimes.root[instruction.source])
            if owner >= 0 and at < last[owner] < follows:
                found.append((owner, at, reader))
        follows = at  # the next instruction that frees nothing
    if not found:
        return {}
    known = last_reads(graph, view_chains(graph))
    copied = {int(lifetimes.root[step.source]) for step in schedule.instructions if isinstance(step, Offload)}
    return {
        owner: at
        for owner, at, reader in found
        if owner not in copied and known.get(schedule.buffers[owner].value) in (reader, OUTPUT)
    }


def _categories(graph: OperatorGraph, schedule: Schedule, lifetimes: Lifetimes) -> dict[int, Category]:
    """Category of each storage by the buffer that owns it; a storage that a gradient aliases is a gradient."""
    result: dict[int, Category] = dict.fromkeys(range(len(schedule.buffers)), Category.ACTIVATIONS)
    for instruction in schedule.instructions:
        if isinstance(instruction, Reshard):
            result[instruction.target] = Category.RESHARDED
    for output, buffer in zip(graph.outputs, schedule.results, strict=True):
        if output.role is OutputRole.GRADIENT:
            result[int(lifetimes.root[buffer])] = Category.GRADIENTS
    for value, buffer in zip(graph.inputs, schedule.inputs, strict=True):
        result[buffer] = _INPUT_CATEGORY.get(graph.values[value].role, Category.INPUTS)
    return result


def _beside(schedule: Schedule, start: int, local_bytes: LocalBytes) -> tuple[int, int]:
    """Bytes that an overlapped collective holds besides source and target: copies made to send and by its wait."""
    instruction = schedule.instructions[start]
    assert isinstance(instruction, Reshard)
    if len(instruction.path) != 2:
        return 0, 0  # a violation
    value = schedule.buffers[instruction.source].value
    (before, after), shapes, (source, target) = local_bytes.along(value, instruction.path)
    was, becomes = next((a, b) for a, b in zip(before, after, strict=True) if a != b)
    rearranged = becomes != "R" and sends_copy(before, after, shapes[0])
    joined = was[0] == "S" and not is_outermost(was, shapes[1])
    return source if rearranged else 0, target if joined else 0


def _add_flat_buffers(
    transient: NDArray[np.int64],
    schedule: Schedule,
    joined: tuple[range, Sequence[Reshard]],
    ends: Mapping[int, int],
    local_bytes: LocalBytes,
) -> None:
    """Add what a bucket holds besides its sources and targets.

    Up to the first wait that is the flat buffer which is sent, unless it is reduced in place, and during this wait that
    which is received, beside the targets that are copied out of it.
    """
    bucket, parts = joined
    if len(bucket) != len(parts) or not ends.keys() >= set(bucket) or any(len(part.path) != 2 for part in parts):
        return  # a violation
    first, sent, received = ends[bucket.start], 0, 0
    for at, part in zip(bucket, parts, strict=True):
        value, (before, after) = schedule.buffers[part.source].value, part.path
        is_in_place = any(old[0] == "P" and new == "R" for old, new in zip(before, after, strict=True) if old != new)
        nbytes = 0 if is_in_place else local_bytes(value, before)
        transient[at:first] += nbytes
        sent += nbytes
        received += local_bytes(value, after)
    transient[first] += max(sent, received)


def _transient(
    graph: OperatorGraph,
    schedule: Schedule,
    instruction: Instruction,
    local_bytes: LocalBytes,
    optimizer: OptimizerMemory,
    device: str,
    released: int,
) -> int:
    """Bytes that an instruction holds while it runs and no longer afterwards, a storage that it ends included."""
    buffers = schedule.buffers
    match instruction:
        case Reshard(source, target, path, overlapped) if not overlapped:
            peak = path_peak(*local_bytes.along(buffers[source].value, path), released)
            return max(0, peak - local_bytes(buffers[target].value, buffers[target].placement))
        case Compute(operator, _, outputs) if outputs and outputs[0] is not None:
            value, placement = buffers[outputs[0]].value, buffers[outputs[0]].placement
            item_bytes = workspace_item_bytes(graph, graph.operators[operator], placement, device)
            return item_bytes * local_bytes.numel(value, placement)
        case Update(parameter, gradient):
            value, placement = buffers[parameter].value, buffers[parameter].placement
            made = graph.values[buffers[gradient].value].spec
            return optimizer.workspace_bytes(graph.values[value].spec, made, local_bytes.numel(value, placement))
    return 0
