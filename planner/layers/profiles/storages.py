"""Bytes of the regions of a traced step, by storage: handed over, kept for backward, or temporary.

Every storage that an operator makes has one owner and is counted once. A forward storage that a later region reads is
handed over; one that the backward pass or the caller needs stays. Memory at a moment is that of torch: a storage
exists from the operator that makes it until the last one that reads it, views not counted. Gradients of parameters
are not in these figures; layer plans count them with the parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from planner.graph.operator_graph import OperatorGraph, OutputRole, Phase, ValueRole

Size = Callable[[int], int]
"""Bytes of a storage by the value that owns it."""


@dataclass(frozen=True, slots=True)
class RegionBytes:
    """Bytes of one region at the batch of the traced step: fields of :class:`.LayerProfile`."""

    input_bytes: int
    carried_bytes: int
    output_bytes: int
    saved_bytes: int
    unread_input_bytes: int


class StorageTimes:
    """Lifetimes of the storages of a step.

    Parameters
    ----------
    graph
        The traced step.
    bases
        Per value of the graph, the value that owns its storage.
    regions
        Per operator, the position of its region.

    Attributes
    ----------
    made
        Owners of the storages that operators make, parameters' gradients left out.
    kept
        Those made in forward that exist beyond it.
    last_region
        Per owner made in forward, the last region that reads it in forward, else the region that makes it.
    """

    def __init__(self, graph: OperatorGraph, bases: Sequence[int], regions: Sequence[int]) -> None:
        self.graph = graph
        self.regions = regions
        self._end = len(graph.operators)
        gradients = {bases[output.value] for output in graph.outputs if output.role is OutputRole.GRADIENT}
        returned = {bases[output.value] for output in graph.outputs} - gradients
        self.first: dict[int, int] = {}
        self.last: dict[int, int] = {}
        self.last_region: dict[int, int] = {}
        self.kept: set[int] = set()
        for operator in graph.operators:
            if operator.is_view:
                continue
            forward = operator.phase is Phase.FORWARD
            for value in operator.outputs:
                if value is not None and value not in gradients:
                    self.first[value] = self.last[value] = operator.index
                    if forward:
                        self.last_region[value] = regions[operator.index]
            for base in {bases[value] for value in operator.inputs}.intersection(self.first):
                self.last[base] = operator.index
                if forward:
                    self.last_region[base] = max(self.last_region[base], regions[operator.index])
                elif base in self.last_region:
                    self.kept.add(base)
        for base in returned.intersection(self.first):
            self.last[base] = self._end
            if base in self.last_region:
                self.kept.add(base)

    @property
    def made(self) -> tuple[int, ...]:
        """Owners in the order in which operators make them."""
        return tuple(self.first)

    def bytes_over_time(self, size: Size) -> NDArray[np.int64]:
        """Bytes that exist while each operator runs, its arguments and results included; (operators,)."""
        change = np.zeros(self._end + 2, dtype=np.int64)
        for owner, first in self.first.items():
            change[first] += size(owner)
            change[self.last[owner] + 1] -= size(owner)
        return np.cumsum(change)[: self._end]

    def handed_over(self, owner: int) -> bool:
        """Whether a forward storage is read in forward by a later region than its maker's."""
        return owner in self.last_region and self.last_region[owner] > self.regions[self.first[owner]]


def region_bytes(times: StorageTimes, count: int, size: Size) -> tuple[RegionBytes, ...]:
    """Bytes of every region, workspaces aside.

    Parameters
    ----------
    times
        Lifetimes of the storages.
    count
        Number of regions.
    size
        Bytes of a storage; smaller under tensor parallelism.
    """
    given, carried, made, saved, unread = ([0] * count for _ in range(5))
    values = times.graph.values
    given[0] = sum(size(value) for value in times.graph.inputs if values[value].role is ValueRole.INPUT)
    for owner, last in times.last_region.items():
        nbytes, region = size(owner), times.regions[times.first[owner]]
        if last > region:
            made[region] += nbytes
            given[region + 1] += nbytes
            unread[region + 1] += 0 if owner in times.kept else nbytes
            for later in range(region + 2, last + 1):
                carried[later] += nbytes
        elif owner in times.kept:
            saved[region] += nbytes
    return tuple(RegionBytes(*figures) for figures in zip(given, carried, made, saved, unread, strict=True))


def bytes_beyond(times: StorageTimes, regions: Sequence[RegionBytes], size: Size) -> NDArray[np.int64]:
    """Bytes alive while each operator runs that the memory model of layer plans does not count otherwise.

    That model counts what the regions up to the operator's own save for backward, the region's input, and in forward
    its result. The input samples are not among either; the caller adds them.

    Returns
    -------
    ndarray
        (operators,); may be negative, and 0 for views.
    """
    handed_over = [0, *(region.input_bytes - region.unread_input_bytes for region in regions[1:])]
    counted = np.cumsum([region.saved_bytes + given for region, given in zip(regions, handed_over, strict=True)])
    alive = times.bytes_over_time(size)
    result = np.zeros(len(alive), dtype=np.int64)
    for operator in times.graph.operators:
        if not operator.is_view:
            region = times.regions[operator.index]
            made = regions[region].output_bytes if operator.phase is Phase.FORWARD else 0
            result[operator.index] = alive[operator.index] - counted[region] - made
    return result
