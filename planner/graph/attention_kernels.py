"""Attention kernels of CUDA devices: which one runs a traced attention, and what it holds beside its results.

A step is traced with the CPU's kernel. On CUDA the executor calls the kernel that is chosen here by dtype, mask, shapes
and compute capability, as ``scaled_dot_product_attention`` would: cuDNN's for 16 bits from Hopper on, before that flash
(Dao 2023) for 16 bits without a mask, the memory-efficient one (Rabe and Staats 2021) for 32 bits and the rest, and
plain tensor operations where none of them takes the shapes.

Workspaces follow what the kernels compute: in 16 bits each backward adds up the gradient of the queries in 32 bits, in
32 bits it multiplies output and gradient. On an H200 those of all kernels but plain operations were measured; sums per
row, 4 bytes each, are not counted. Neither is what a kernel that splits the keys holds, which it does where queries are
too few for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import ceil, prod

AMPERE, HOPPER = (8, 0), (9, 0)
"""Compute capabilities: the first with flash attention and bfloat16, the first on which cuDNN's kernel is chosen."""

BLOCK_ROWS = 256
"""Query rows whose scores exist at once where no kernel takes the shapes."""

_HALF = ("float16", "bfloat16")
_SUMS = 4
_MOST_FLASH, _MOST_CUDNN, _MOST_IN_REGISTERS = 192, 128, 128


class AttentionKernel(StrEnum):
    """Kernel that runs attention on CUDA; the name begins the keys of its rates in a cluster."""

    FLASH = "flash"
    EFFICIENT = "efficient"
    CUDNN = "cudnn"
    BLOCKS = "blocks"


@dataclass(frozen=True, slots=True)
class AttentionShapes:
    """What the choice of a kernel depends on.

    Parameters
    ----------
    dtype
        Torch's name.
    query, key, value
        Shapes (batch, heads, rows, head size).
    masked
        Whether a mask is added to the scores.
    causal
        Whether scores above the diagonal are left out.
    """

    dtype: str
    query: Sequence[int]
    key: Sequence[int]
    value: Sequence[int]
    masked: bool = False
    causal: bool = False

    @property
    def shared_heads(self) -> bool:
        """Whether several heads of queries share one of keys and values."""
        return self.query[1] != self.key[1]

    def kernel(self, capability: tuple[int, int] = AMPERE) -> AttentionKernel:
        """The kernel on a device of a compute capability."""
        half, head = self.dtype in _HALF, self.query[-1]
        aligned = all(shape[-1] % (8 if half else 4) == 0 for shape in (self.query, self.key, self.value))
        if not aligned or self.dtype not in (*_HALF, "float32") or (self.causal and self.masked):
            return AttentionKernel.BLOCKS
        if self.dtype == "bfloat16" and capability < AMPERE:
            return AttentionKernel.BLOCKS
        square = self.query[2] == self.key[2] and self.value[-1] == head
        divided = self.masked and self.shared_heads
        if half and square and head <= _MOST_CUDNN and not divided and capability >= HOPPER:
            return AttentionKernel.CUDNN
        if half and square and not self.masked and head <= _MOST_FLASH and capability >= AMPERE:
            return AttentionKernel.FLASH
        return AttentionKernel.EFFICIENT

    def workspace_item_bytes(self, backward: bool) -> int:
        """Bytes beside arguments and results, per element of the queries (of which a result is the first one)."""
        half, repeat = self.dtype in _HALF, ceil(self.query[1] / self.key[1])
        per_query = prod(self.key[2:]) / prod(self.query[2:])
        item = 2 if half else _SUMS
        kernel = self.kernel()
        if kernel is AttentionKernel.BLOCKS:
            # All in 32 bits, and the scores of a block of rows, with a second copy where they are made or used.
            scores = 2 * min(BLOCK_ROWS, self.query[2]) * self.key[2] / prod(self.query[2:])
            copies = (1 if half else 0) * (1 + 2 * per_query / repeat) + (2 * per_query / repeat if backward else 0)
            return ceil(_SUMS * (scores + copies))
        own = shared = 0.0
        if backward or (half and kernel is AttentionKernel.EFFICIENT and self.value[-1] > _MOST_IN_REGISTERS):
            own = _SUMS
        if self.shared_heads and (backward or kernel is AttentionKernel.EFFICIENT):
            # Keys and values, or their gradients, of every head; the memory-efficient backward has both.
            shared = 2 * item * per_query * (2 if backward and kernel is AttentionKernel.EFFICIENT else 1)
        # In 32 bits the product of output and gradient is gone when gradients of shared heads are added up.
        return ceil(own + shared if half else max(own, shared))
