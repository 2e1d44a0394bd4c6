"""The schedule: one explicit list of instructions that the replay checks and the executor lowers.

A *buffer* is one version of one value under one placement on every rank. Instructions create buffers,
read them and free them; each buffer is created once. Views alias the storage of the buffer they read, and so do
reductions in place.

A buffer lies on the device, or in pinned host memory where an :class:`Offload` created it (*host buffer*).
Instructions run one after another on the device's compute stream. Copies to and from the host run beside
them on two links, outward and inward; each takes its copies in the order of their instructions, one at a time.
A copy begins when its instruction is reached, its link is free and its source is complete. The compute stream
waits in two places only:

- the first instruction that reads the target of a :class:`Prefetch` (a view counts) waits for that copy;
- a :class:`Free` waits for every copy that reads or writes one of its buffers.

So neither a source nor a host buffer is released while a copy uses it. Where the host link is shared by both
directions there is one link in place of two; where copies cannot run beside the computation (processes on a
CPU) the compute stream waits for each copy at once (:class:`planner.machine.cluster.HostCopies`).

A :class:`Reshard` is done before the next instruction, unless it is *overlapped*: then it is one collective that
starts when its instruction is reached and runs beside the computation, up to a :class:`Wait` for its target. Overlapped
collectives of one mesh axis run one after another, in the order of their instructions, which is the same on all ranks;
those of different axes run side by side. They have process groups of their own: other collectives on the same axis do
not wait behind them, but share the link with them.

Overlapped reshardings of one kind, mesh axis and dtype that follow one another directly may be *joined* in a *bucket*,
which is one collective: their sources are copied into a flat buffer, and all targets out of another one by the first
wait. The waits for a bucket follow one another directly too, in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from planner.graph.placement import Placement, is_outermost


@dataclass(frozen=True, slots=True)
class Buffer:
    """One version of value ``value`` (index into the operator graph) under ``placement``."""

    value: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class Compute:
    """Run operator ``operator`` on local tensors.

    ``inputs`` holds one buffer per tensor argument (in the operator's order), ``outputs`` one per
    returned tensor: None where the operator returns none there, and for outputs of a view that are never
    read. ``recompute`` marks a further execution of an operator that already ran. Views are run wherever they
    are needed, so a view's further executions are not recomputation.
    """

    operator: int
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class Reshard:
    """Bring ``source`` to another placement in a new buffer ``target``.

    ``path`` starts with the source's placement and ends with the target's; each step changes the placement
    on exactly one mesh axis and is one collective (or a local slice).

    If ``overlapped``, the path is a single collective, and ``target`` is not there before its :class:`Wait`. Its bytes
    count from here on, and so do those of the copy that some collectives send in place of ``source``
    (:func:`sends_copy`); where there is none, ``source`` is freed and changed only behind the wait.

    If ``joined``, it is part of the collective of the instruction before it. All parts of a bucket send copies.

    If ``in_place``, it is an overlapped all-reduce of its own that changes ``source``, whose storage becomes that of
    ``target``: nothing reads any other buffer of this storage from here on.
    """

    source: int
    target: int
    path: tuple[Placement, ...]
    overlapped: bool = False
    joined: bool = False
    in_place: bool = False


@dataclass(frozen=True, slots=True)
class Wait:
    """Let the computation wait for the overlapped resharding that makes ``buffer``."""

    buffer: int


@dataclass(frozen=True, slots=True)
class Update:
    """Optimizer step of parameter buffer ``parameter`` with gradient buffer ``gradient`` (same placement)."""

    parameter: int
    gradient: int


@dataclass(frozen=True, slots=True)
class Free:
    """Drop buffers; a storage is released when no buffer that aliases it is left.

    It waits for every copy between device and host that reads or writes one of the buffers.
    """

    buffers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offload:
    """Start a copy of ``source`` to a host buffer ``target`` on the outward link.

    ``source`` is an output of a :class:`Compute` of a non-view operator, and no result of the step aliases it:
    parameters, inputs, gradients and resharded copies stay on the device. Both buffers have one value and one
    placement. The host buffer's bytes count from here until it is freed; the device keeps those of ``source``
    until its own :class:`Free`, which waits for the copy. ``source`` may be read in the meantime.
    """

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Start a copy of host buffer ``source`` back to a device buffer ``target`` on the inward link.

    Both buffers have one value and one placement. The bytes of ``target`` count from here on; its first reader
    waits for the copy. A view of an offloaded value is taken again from ``target``. Only prefetches read host
    buffers, and each host buffer has at least one.
    """

    source: int
    target: int


Instruction = Compute | Reshard | Wait | Update | Free | Offload | Prefetch


def reads(instruction: Instruction) -> tuple[int, ...]:
    """Buffers that an instruction reads."""
    match instruction:
        case Compute(inputs=inputs):
            return inputs
        case Update(parameter, gradient):
            return (parameter, gradient)
        case Reshard() | Offload() | Prefetch():
            return (instruction.source,)
        case Wait(buffer):
            return (buffer,)
        case Free(buffers):
            return buffers


def creates(instruction: Instruction) -> tuple[int, ...]:
    """Buffers that an instruction creates."""
    match instruction:
        case Compute(outputs=outputs):
            return tuple(buffer for buffer in outputs if buffer is not None)
        case Reshard() | Offload() | Prefetch():
            return (instruction.target,)
        case _:
            return ()


def waits(instructions: Sequence[Instruction]) -> dict[int, int]:
    """Position of the wait by position of each overlapped resharding; a correct schedule waits for all."""
    ends = {entry.buffer: at for at, entry in enumerate(instructions) if isinstance(entry, Wait)}
    return {
        at: ends[entry.target]
        for at, entry in enumerate(instructions)
        if isinstance(entry, Reshard) and entry.overlapped and entry.target in ends
    }


def buckets(instructions: Sequence[Instruction]) -> dict[range, tuple[Reshard, ...]]:
    """Parts of each bucket by their positions: an overlapped resharding, and those directly behind that are joined."""
    found: list[range] = []
    for at, entry in enumerate(instructions):
        if isinstance(entry, Reshard) and entry.joined:
            first = found.pop().start if found and found[-1].stop == at else max(at - 1, 0)
            found.append(range(first, at + 1))
    return {
        bucket: tuple(entry for entry in instructions[bucket.start : bucket.stop] if isinstance(entry, Reshard))
        for bucket in found
    }


def bucket_ends(instructions: Sequence[Instruction]) -> dict[int, int]:
    """Position of the last part of its bucket by position of each part."""
    return {at: bucket.stop - 1 for bucket in buckets(instructions) for at in bucket}


def sends_copy(before: Placement, after: Placement, sizes: Sequence[int]) -> bool:
    """Whether a collective works on a copy of its source, which so may be freed while it runs.

    An all-reduce works in its target. What is scattered along another dimension than the outermost one in memory is
    rearranged before. Placements, and the local ``sizes`` of the source's dimensions, are in the order of memory.
    """
    old, new = next(((a, b) for a, b in zip(before, after, strict=True) if a != b), ("R", "R"))
    return (old[0] == "P" and new == "R") or (old != "R" and new[0] == "S" and not is_outermost(new, sizes))


def host_buffers(instructions: Iterable[Instruction]) -> frozenset[int]:
    """Buffers in host memory: those that offloads create."""
    return frozenset(entry.target for entry in instructions if isinstance(entry, Offload))


@dataclass(frozen=True, slots=True)
class Schedule:
    """A whole training step on a mesh.

    Parameters
    ----------
    mesh
        Size of each mesh axis; ranks are numbered row-major.
    buffers
        Every buffer, by index.
    inputs
        One buffer per graph input, in the graph's order; they exist before the first instruction.
        Parameters and buffers of the module stay for the whole step and are never freed.
    instructions
        In order of execution.
    results
        One buffer per graph output, in the graph's order. The loss and buffer updates are replicated;
        a gradient has its parameter's placement. Results other than gradients are never freed;
        a gradient is freed after its update.
    """

    mesh: tuple[int, ...]
    buffers: tuple[Buffer, ...]
    inputs: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    results: tuple[int, ...]
