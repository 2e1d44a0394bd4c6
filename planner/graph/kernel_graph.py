"""A forward or backward graph as kernels and the tensors that they leave in memory; plain data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple


class CompileError(ValueError):
    """A graph that cannot be planned, or a limit that nothing fits; the message names the remedy."""


class Tensors(NamedTuple):
    """Bytes that an operator reads and returns."""

    read: int
    returned: int


@dataclass(frozen=True, slots=True)
class Kernel:
    """An operator that is called, or several for which one kernel is generated.

    Parameters
    ----------
    operators
        Names of the nodes.
    targets
        Their targets, with the bytes that each reads and returns; those of several outputs once.
    reads, writes
        Values, by the names of the nodes that made them. What only the kernel itself reads is not among them.
    flops
        FLOP of one execution.
    dtype
        Of the arithmetic.
    is_random
        Whether it draws random numbers, or seeds.
    is_generated
        Whether its code is generated.
    overwrites
        Results with the argument whose memory each takes where nothing reads that afterwards.
    """

    operators: tuple[str, ...]
    targets: tuple[tuple[str, Tensors], ...]
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    flops: int
    dtype: str
    is_random: bool
    is_generated: bool
    overwrites: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class KernelGraph:
    """Kernels in the order in which they run.

    Parameters
    ----------
    kernels
        The kernels.
    sizes
        Bytes of every value.
    given
        Values that are there at the start: parameters, inputs, what was kept, gradients of outputs.
    results
        Values that are returned.
    kept
        Values that a forward keeps for its backward.
    roots
        Per node the value in whose memory its result is.
    """

    kernels: tuple[Kernel, ...]
    sizes: Mapping[str, int]
    given: tuple[str, ...]
    results: tuple[str, ...]
    kept: tuple[str, ...]
    roots: Mapping[str, str]
