"""What an optimizer keeps and needs per trainable parameter, in tensors of the parameter's local size."""

from __future__ import annotations

from dataclasses import dataclass


class OptimizerError(ValueError):
    """An optimizer that does not exist; the message lists those that do."""


@dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """Memory of one optimizer.

    Parameters
    ----------
    name
        ``adamw`` or ``sgd``.
    state_tensors
        Tensors kept between steps per parameter (AdamW: two moments).
    workspace_tensors
        Temporaries alive at once while one parameter is updated, one parameter after another.
    """

    name: str
    state_tensors: int
    workspace_tensors: int


OPTIMIZERS = {
    "adamw": OptimizerSpec("adamw", state_tensors=2, workspace_tensors=2),
    "sgd": OptimizerSpec("sgd", state_tensors=0, workspace_tensors=0),
}


def optimizer_named(name: str) -> OptimizerSpec:
    """Look up an optimizer.

    Raises
    ------
    OptimizerError
        If there is none of that name; the message lists the known ones.
    """
    if name not in OPTIMIZERS:
        raise OptimizerError(f"optimizer {name!r} is not known; choose one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]
