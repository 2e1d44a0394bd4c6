"""What the links to the host carry by when: rows of usage beside those of memory.

No event begins before the least time that the events before it take. Behind it at most so much time lies as those
events take and whatever the step takes beyond its least time. Between an event and *the boundary*, where backward
begins, all copies that must happen in between fit together:

- *outward*, those of activations that are free to leave from some event of forward on, and are away at the boundary;
- *inward*, those of activations that come back in backward and are needed by some event of it.

So an activation's copy uses the rows of all events up to the one behind which it leaves, or from the one on that
needs it: consecutive ones, written as usage at the *times* of a resource that is a link. Rows stand at about equal
distances of time. What a row has less than the longest one of its link is used by a node with one strategy, the
*clock*.

Waiting makes rows longer, at its price (:func:`waits`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from formulations.problem import IntArray, UsageTerm

ROWS = 64
"""Rows of a link at most, its two ends aside."""

_STEPS_OF_DOUBLING, _DOUBLINGS = 4, 8
"""Lengths of waiting: so many between one and its double, and so often the shortest is doubled."""


@dataclass(frozen=True, slots=True)
class Span:
    """Rows of a link from ``first`` up to but without ``end``."""

    first: int
    end: int


@dataclass(frozen=True)
class LinkRows:
    """Where the rows of both links stand.

    Parameters
    ----------
    begins
        Least time at which every event begins, and that of the end of the step, quanta; shape ``(events + 1,)``.
    boundary
        First event of backward.
    """

    begins: IntArray
    boundary: int

    @cached_property
    def outward(self) -> IntArray:
        """Events of forward at which there are rows, shape ``(rows,)``."""
        return _spread(self.begins, 0, self.boundary)

    @cached_property
    def inward(self) -> IntArray:
        """Events of backward at which there are rows, the end of the step as the last one; shape ``(rows,)``."""
        return _spread(self.begins, self.boundary, len(self.begins) - 1)

    @property
    def forward_time(self) -> int:
        """Least time of forward."""
        return int(self.begins[self.boundary])

    @property
    def backward_time(self) -> int:
        """Least time of backward."""
        return int(self.begins[-1]) - self.forward_time

    def leaving(self, event: int) -> Span:
        """Rows that a copy outward uses which runs between an event and the boundary."""
        return Span(0, int(np.searchsorted(self.outward, event, side="right")))

    def returning(self, event: int) -> Span:
        """Rows that a copy inward uses which runs between the boundary and an event."""
        return Span(int(np.searchsorted(self.inward, event)), len(self.inward))

    def clock(self, outward: int, inward: int) -> list[UsageTerm]:
        """What rows have less than the longest row of their link, as usage of these two resources."""
        short = {
            outward: self.begins[self.outward],
            inward: self.backward_time - (self.begins[self.inward] - self.forward_time),
        }
        return [
            UsageTerm(resource, row, row + 1, np.array([less]))
            for resource, lengths in short.items()
            for row, less in enumerate(lengths.tolist())
            if less
        ]


def waits(most: int) -> IntArray:
    """Times that something may wait, in growing order: each a fixed factor of the one before it, ``most`` the last.

    Parameters
    ----------
    most
        Quanta.

    Returns
    -------
    IntArray
        All positive, or one zero where nothing may wait.
    """
    exponents = np.arange(-_DOUBLINGS * _STEPS_OF_DOUBLING, 1) / _STEPS_OF_DOUBLING
    times: IntArray = np.unique(np.ceil(most * 2.0**exponents).astype(np.int64))
    times[-1] = most
    return times


def _spread(begins: IntArray, first: int, last: int) -> IntArray:
    """Events from ``first`` to ``last`` at about equal distances of time, both among them."""
    times = np.linspace(begins[first], begins[last], ROWS)
    events: IntArray = np.unique([first, *np.clip(np.searchsorted(begins, times), first, last), last]).astype(np.int64)
    return events
