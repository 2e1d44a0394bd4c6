"""Which updates of parameters are made at once by one kernel, at the peak that updates one by one have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate


@dataclass(frozen=True, slots=True)
class UpdateMemory:
    """Bytes of one update.

    Parameters
    ----------
    name
        The parameter.
    gradient
        Its gradient.
    copied
        A copy of it that the kernel takes in its place; 0 where it takes the gradient itself.
    planned
        What the plan counts beside parameter, gradient and state.
    """

    name: str
    gradient: int
    copied: int
    planned: int


def ends_of_groups(updates: Sequence[UpdateMemory]) -> frozenset[str]:
    """Last updates of the groups that are made at once, with the peak that updates one by one have by the plan.

    Parameters
    ----------
    updates
        In order. All gradients are there at the first of them; those of a group are freed when it ends.
    """
    freed = [0, *accumulate(update.gradient for update in updates)]
    allowed = max(update.planned - before for update, before in zip(updates, freed, strict=False))
    ends, begun, held = [], 0, 0
    for at, update in enumerate(updates):
        if at > begun and held + update.copied - freed[begun] > allowed:
            ends.append(updates[at - 1].name)
            begun, held = at, 0
        held += update.copied
    return frozenset((*ends, updates[-1].name))
