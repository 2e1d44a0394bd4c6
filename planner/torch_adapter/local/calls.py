"""The torch call behind one operator of the graph: its overload and its constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten


@dataclass(frozen=True, slots=True)
class Slot:
    """Placeholder of the ``position``-th tensor argument in a template of arguments."""

    position: int


@dataclass(frozen=True, slots=True, eq=False)
class OperatorCall:
    """An ATen overload and its arguments, with the tensors left open.

    Parameters
    ----------
    target
        The overload to call.
    leaves, treespec
        Flattened ``(args, kwargs)`` in which tensor ``k`` of the operator's inputs is ``Slot(k)``.
    """

    target: torch._ops.OpOverload
    leaves: tuple[object, ...]
    treespec: TreeSpec

    @classmethod
    def from_template(
        cls, target: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> OperatorCall:
        """Build from arguments that already hold a :class:`Slot` for every tensor."""
        leaves, treespec = tree_flatten((args, kwargs))
        return cls(target, tuple(leaves), treespec)

    def template(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """``args`` and ``kwargs`` with a :class:`Slot` for every tensor."""
        args, kwargs = tree_unflatten(self.leaves, self.treespec)
        return args, kwargs

    @property
    def returns_one_tensor(self) -> bool:
        """Whether the overload returns a bare tensor, not a tuple or list."""
        returns = self.target._schema.returns
        return len(returns) == 1 and str(returns[0].type) == "Tensor"

    def arguments(
        self, tensors: Sequence[object], device: torch.device | None = None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Fill the slots.

        Parameters
        ----------
        tensors
            One object per tensor argument, in the operator's order.
        device
            Device that replaces the traced one in factory calls (``arange``, ``full``); None keeps it.

        Returns
        -------
        tuple
            ``args`` and ``kwargs`` for ``target``.
        """
        filled = []
        for leaf in self.leaves:
            if isinstance(leaf, Slot):
                filled.append(tensors[leaf.position])
            elif device is not None and isinstance(leaf, torch.device):
                filled.append(device)
            else:
                filled.append(leaf)
        args, kwargs = tree_unflatten(filled, self.treespec)
        return args, kwargs
