"""Capacity of the links to the host over time: rows of usage beside those of memory.

Between an event and *the boundary*, where backward begins, all copies that must happen in between fit together:

- *outward*, those of activations whose copy may start at some event of forward, and that are away at the boundary;
- *inward*, those of activations that are prefetched in backward and read by some event of it.

So an outward copy uses the rows of all events up to the one behind which it may start, and an inward copy those from
its reader's event on. These rows are consecutive and are written as usage at the *times* of a resource, the link. Rows
stand at about equal distances of time (:mod:`formulations.step.offload.times`).

The length of a row is the least time between its two events. Decisions that take time make it longer: stalls, at their
price, and in the relaxation all reruns. Usage is never negative, so the length of a row includes the most that all
decisions can add, and every decision uses the part that it does not add (:meth:`Rows.lengthen`). All rows of a link
have the limit of the longest one, and a node with one strategy, the *clock*, uses the difference.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from formulations.problem.strategy_problem import IntArray, UsageTerm

_STEPS_OF_DOUBLING, _DOUBLINGS = 12, 10
"""Number of levels between one and its double, and number of doublings of the lowest level."""


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
        Resource whose times are the rows.
    events
        Events at which the rows stand, in growing order; shape ``(rows,)``.
    lengths
        Lengths in the unit of the resource, shape ``(rows,)``; they grow with every decision.
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
        """Make some rows longer by ``most``; each strategy of a node uses ``less``, the part that it does not add."""
        self.lengths[span.first : span.end] += most
        return self.use(span, less)

    def clock(self) -> list[UsageTerm]:
        """Usage of the clock: the difference of each row to the longest one."""
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
