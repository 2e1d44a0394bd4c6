"""What the links to the host carry by when: rows of usage beside those of memory.

Between an event and *the boundary*, where backward begins, all copies that must happen in between fit together:

- *outward*, those of activations that are free to leave from some event of forward on, and are away at the boundary;
- *inward*, those of activations that come back in backward and are needed by some event of it.

So an activation's copy uses the rows of all events up to the one behind which it leaves, or from the one on that
needs it: consecutive ones, written as usage at the *times* of a resource that is a link. Rows stand at about equal
distances of time (:mod:`formulations.step.offload.times`).

A row is as long as the time that lies between its two events at least. Decisions that take time make it longer:
waiting, at its price, and in the relaxation whatever runs again. Usage is never negative, so a row counts the most
that all decisions can give, and every decision uses what it gives less (:meth:`Rows.lengthen`). What a row has less
than the longest one of its link is used by a node with one strategy, the *clock*.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from formulations.problem.strategy_problem import IntArray, UsageTerm

_STEPS_OF_DOUBLING, _DOUBLINGS = 12, 10
"""Levels of what is chosen: so many between one and its double, and so often the lowest is doubled."""


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of a link from ``first`` up to but without ``end``."""

    first: int
    end: int


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Rows of one link.

    Parameters
    ----------
    resource
        Whose times the rows are.
    events
        Where the rows stand, in growing order; shape ``(rows,)``.
    lengths
        How long they are, in the unit of the resource; shape ``(rows,)``. Grows with every decision.
    """

    resource: int
    events: IntArray
    lengths: IntArray

    @property
    def limit(self) -> int:
        """Length of the longest row."""
        return int(self.lengths.max())

    @property
    def all(self) -> Span:
        """All rows."""
        return Span(0, len(self.events))

    def up_to(self, event: int) -> Span:
        """Rows that stand at an event or before it."""
        return Span(0, int(np.searchsorted(self.events, event, side="right")))

    def since(self, event: int) -> Span:
        """Rows that stand at an event or behind it."""
        return Span(int(np.searchsorted(self.events, event)), len(self.events))

    def use(self, span: Span, amount: IntArray) -> list[UsageTerm]:
        """Usage of some rows, or nothing."""
        if span.first >= span.end or not np.count_nonzero(amount):
            return []
        return [UsageTerm(self.resource, span.first, span.end, amount)]

    def lengthen(self, span: Span, most: int, less: IntArray) -> list[UsageTerm]:
        """Make some rows longer, by ``most`` less what the strategies of a node give ``less``: that they use."""
        self.lengths[span.first : span.end] += most
        return self.use(span, less)

    def clock(self) -> list[UsageTerm]:
        """What rows have less than the longest one."""
        less = self.limit - self.lengths
        return [
            term for row in np.flatnonzero(less).tolist() for term in self.use(Span(row, row + 1), less[row : row + 1])
        ]


def levels(most: int) -> IntArray:
    """Levels up to ``most``, in growing order: each a fixed factor of the one before it.

    Returns
    -------
    IntArray
        All positive and ``most`` the last, or one zero where nothing may be chosen.
    """
    exponents = np.arange(-_DOUBLINGS * _STEPS_OF_DOUBLING, 1) / _STEPS_OF_DOUBLING
    found: IntArray = np.unique(np.ceil(most * 2.0**exponents).astype(np.int64))
    found[-1] = most
    return found
