"""State and workspace of an optimizer per trainable parameter, and the memory traffic of an update."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from planner.graph.operator_graph import HALF, ITEM_BYTES

_MASTER = "float32"

OptimizerName = Literal["adamw", "sgd", "sgd_momentum", "adamw_mixed"]
"""Names as plan files write them; those of :data:`OPTIMIZERS`."""


ReduceDtype = Literal["float32", "same"]
"""Dtype in which gradients of 16-bit parameters are summed over devices and given to the optimizer."""


class OptimizerError(ValueError):
    """An optimizer that does not exist; the message lists those that do."""


class Buffers(NamedTuple):
    """Tensors of a parameter's local size: how many, and bytes per element of each."""

    tensors: int
    item_bytes: int

    def nbytes(self, numel: int) -> int:
        """Bytes of all of them for a parameter of ``numel`` local elements."""
        return self.tensors * self.item_bytes * numel


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """Memory and traffic of one optimizer.

    Parameters
    ----------
    name
        A name of :data:`OPTIMIZERS`.
    state_tensors
        Tensors kept between steps per parameter (AdamW: two moments).
    workspace_tensors
        Temporaries alive at once while one parameter is updated, one parameter after another.
    parameter_passes
        Times that an update moves a parameter's bytes for the parameter and its gradient: both are read, the
        parameter is written.
    state_passes
        The same for the state: every tensor is read and written.
    master
        Whether a parameter of 16 bits is updated in 32 bits: a master copy of it is state as well, the
        state has 32 bits, and a gradient of 16 bits is copied to 32 for the time of the update (Micikevicius
        et al. 2018, section 3.1). The 16-bit parameter is then only written.
    micro_batches
        Of a step; where there are several, the sum of their gradients is state as well, in its dtype.
    fused
        Whether one kernel updates a parameter. It holds no temporaries but a copy of the gradient, where that has
        another dtype or lies otherwise than the parameter.
    """

    name: OptimizerName
    state_tensors: int
    workspace_tensors: int
    parameter_passes: int = 3
    state_passes: int = 0
    master: bool = False
    micro_batches: int = 1
    fused: bool = False

    def state(self, dtype: str) -> Buffers:
        """Buffers that a parameter of ``dtype`` (torch's name) keeps between steps, or between micro-batches."""
        tensors = self.state_tensors + (self.micro_batches > 1)
        if self.keeps_master(dtype):
            return Buffers(tensors + 1, ITEM_BYTES[_MASTER])
        return Buffers(tensors, ITEM_BYTES[dtype])

    def workspace(self, dtype: str, gradient: str, contiguous: bool = True) -> Buffers:
        """Buffers alive at once beyond parameter, gradient and state while a parameter of ``dtype`` is updated.

        ``contiguous`` says whether the gradient is, as parameters are.
        """
        trained = self.trained(dtype)
        if self.fused:
            return Buffers(int(gradient != trained or not contiguous), ITEM_BYTES[trained])
        return Buffers(self.workspace_tensors + (gradient != trained), ITEM_BYTES[trained])

    def moved_bytes(self, dtype: str, numel: int, gradient: str) -> int:
        """Bytes read and written by the update of ``numel`` elements of ``dtype``, all in one pass."""
        own, read = ITEM_BYTES[dtype], ITEM_BYTES[gradient]
        if self.keeps_master(dtype):
            # The master copy is read and written in the place of the parameter, which is only written.
            return numel * ((self.parameter_passes - 2) * own + read + (self.state_passes + 2) * ITEM_BYTES[_MASTER])
        return numel * ((self.parameter_passes - 1 + self.state_passes) * own + read)

    def trained(self, dtype: str) -> str:
        """Dtype of what is updated in the place of a parameter of ``dtype``."""
        return _MASTER if self.keeps_master(dtype) else dtype

    def keeps_master(self, dtype: str) -> bool:
        """Whether a parameter of ``dtype`` is updated through a master copy."""
        return self.master and dtype in HALF


OPTIMIZERS: dict[str, OptimizerSpec] = {
    spec.name: spec
    for spec in (
        OptimizerSpec("adamw", state_tensors=2, workspace_tensors=2, state_passes=4),
        OptimizerSpec("sgd", state_tensors=0, workspace_tensors=0),
        OptimizerSpec("sgd_momentum", state_tensors=1, workspace_tensors=0, state_passes=2),
        OptimizerSpec("adamw_mixed", state_tensors=2, workspace_tensors=2, state_passes=4, master=True),
    )
}


def default_optimizer(dtype: str) -> OptimizerName:
    """AdamW for parameters of a dtype: in 32 bits for those of 16, since moments of 16 bits round small steps away."""
    return "adamw_mixed" if dtype in HALF else "adamw"


def optimizer_named(name: str, micro_batches: int = 1, fused: bool = True) -> OptimizerSpec:
    """Look up an optimizer, for steps of so many micro-batches; torch's AdamW as one kernel, or as a dozen.

    Raises
    ------
    OptimizerError
        If there is none of that name; the message lists the known ones.
    """
    if name not in OPTIMIZERS:
        raise OptimizerError(f"optimizer {name!r} is not known; choose one of {', '.join(OPTIMIZERS)}")
    has_kernel = OPTIMIZERS[name].workspace_tensors > 0
    return replace(OPTIMIZERS[name], micro_batches=micro_batches, fused=fused and has_kernel)
