"""The schedule: one explicit list of instructions that the replay checks and the executor lowers.

A *buffer* is one version of one value under one placement on every rank. Instructions create buffers,
read them and free them; each buffer is created once. Views alias the storage of the buffer they read.
Offload and prefetch are in the language so that plans which use them can be read and refused by name.
"""

from __future__ import annotations

from dataclasses import dataclass

from planner.placement import Placement


@dataclass(frozen=True, slots=True)
class Buffer:
    """One version of value ``value`` (index into the operator graph) under ``placement``."""

    value: int
    placement: Placement


@dataclass(frozen=True, slots=True)
class Compute:
    """Run operator ``operator`` on local tensors.

    ``inputs`` holds one buffer per tensor argument (in the operator's order), ``outputs`` one per
    returned tensor: None where the operator returns none there, and for outputs of a view that nobody
    reads. ``recompute`` says that this is a further execution of an operator that already ran. Views are
    run wherever they are needed, so a view's further executions are not recomputation.
    """

    operator: int
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    recompute: bool = False


@dataclass(frozen=True, slots=True)
class Reshard:
    """Bring ``source`` to another placement in a new buffer ``target``.

    ``path`` starts with the source's placement and ends with the target's; each step changes the word
    of exactly one mesh axis and is one collective (or a local slice).
    """

    source: int
    target: int
    path: tuple[Placement, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """Optimizer step of parameter buffer ``parameter`` with gradient buffer ``gradient`` (same placement)."""

    parameter: int
    gradient: int


@dataclass(frozen=True, slots=True)
class Free:
    """Drop buffers; a storage is released when no buffer that aliases it is left."""

    buffers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Offload:
    """Copy ``source`` to a host buffer ``target``."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Prefetch:
    """Copy host buffer ``source`` back to a device buffer ``target``."""

    source: int
    target: int


Instruction = Compute | Reshard | Update | Free | Offload | Prefetch


def reads(instruction: Instruction) -> tuple[int, ...]:
    """Buffers that an instruction reads."""
    match instruction:
        case Compute(inputs=inputs):
            return inputs
        case Update(parameter, gradient):
            return (parameter, gradient)
        case Reshard() | Offload() | Prefetch():
            return (instruction.source,)
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
