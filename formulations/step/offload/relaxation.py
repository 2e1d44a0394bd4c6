"""The relaxation of offload: a lower bound on cost and memory of all plans that cost at most the best known.

Modes of activations
    A mode fixes when the outward copy ends and when the activation is back. An activation may have several offloaded
    outputs, each with a stay of its own; the mode is that of its *main* output, the one whose copies take longest. The
    others use no link, and are on the device until their last forward use and from their first backward use on.

    - *early*: the copy ends before the boundary. It uses the outward rows from the activation's operator on.
    - *late*: the copy ends behind it, so the activation is on the device at the boundary, and *leaving* then.
    - *brief*: the activation is back before the boundary, or the copy back begins before it.

    Early and late copies back lie behind the boundary: in the inward rows of the first read in backward, or of the
    last rerun before it that may be the first to read (*soon*).

The clock
    The time between the boundary and an event is the sum of the least time of the events between, the additional time
    of layouts (at most that of the best known plan beyond the least time), the chosen reruns between, and the stalls
    there, which are at most those of all backward, at their price. In forward it is the same without reruns.

Leaving activations
    The link takes one copy after the other. Of the late ones at most one begins before the boundary: a node chooses
    its *head start*, which uses the outward rows as far as they are that long. Up to an event of backward the link has
    carried at most the bytes of the head start and of the time since the boundary. The other bytes are still on the
    device, where no late mode counts them. A node for every row chooses their number: they use the memory between this
    row and the one before, and make the row longer,

        bytes of all late activations <= bytes per quantum * (head start + time) + bytes still leaving.

    Bytes per quantum are those of the fastest copy; copies of small activations are slower, which relaxes the row.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise

import numpy as np

from formulations.problem.strategy_problem import IntArray, Resource, UsageTerm
from formulations.step.offload.builder import OffloadProblemBuilder
from formulations.step.offload.links import Rows, Span, levels
from formulations.step.offload.modes import AtMost, OffloadMode, waiting_outputs
from formulations.step.sharding import UNREAD
from formulations.step.training_step import NodeKind

LEAVING = 4
"""Index of the resource whose times are the rows of leaving activations."""

MOST_UNITS = 1 << 20
"""Largest number of units for leaving activations: in bytes, rounded prices of a few rows would weigh much."""


@dataclass(frozen=True, slots=True, eq=False)
class _Main:
    """The output of an activation whose copies take longest.

    Parameters
    ----------
    output
        Its index.
    reader
        The first backward operator that reads it.
    copies, bytes
        Time of a copy and size, per layout, shape ``(S,)``.
    """

    output: int
    reader: int
    copies: IntArray
    bytes: IntArray

    @property
    def leaving(self) -> IntArray:
        """Bytes whose copy takes time."""
        return np.where(self.copies > 0, self.bytes, 0)


class OffloadRelaxationBuilder(OffloadProblemBuilder):
    """Offload in the modes of the relaxation."""

    def resources(self) -> tuple[Resource, ...]:
        """Also the rows of leaving activations."""
        return *super().resources(), Resource(f"leaving ({self._unit} bytes)", self.leaving.limit)

    @property
    def _at_most(self) -> AtMost:
        assert self.links.at_most is not None, "the relaxation needs the cost of a plan"
        return self.links.at_most

    @property
    def most_excess(self) -> int:
        """Time of the best known plan beyond the least time of all operators."""
        return max(0, self._at_most.cost - self.times.step)

    @cached_property
    def leaving(self) -> Rows:
        """Rows of leaving activations, denser near the boundary, until all bytes that fit on the device have left."""
        boundary = self.boundary
        gone = self.times.begins[boundary] + levels(int(self._most_leaving / (self._speed * self._unit)))
        behind = np.searchsorted(self.times.begins, gone)
        events = np.unique([boundary, *np.clip(behind, boundary, len(self.timeline.events))]).astype(np.int64)
        time = self.times.since(boundary, events, self.most_excess)
        return Rows(LEAVING, events, self._carried(time))

    @cached_property
    def _mains(self) -> dict[int, _Main]:
        """By activation, its main output."""
        found = {}
        for i in self.offloads:
            node, waiting = self.model.nodes[i], waiting_outputs(self.model, i)
            assert node.transfer_cost is not None
            longest = node.transfer_cost[:, waiting].max(axis=0)
            output = waiting[int(np.argmax(longest))]
            copies, size = node.transfer_cost[:, output], node.output_bytes[:, output]
            found[i] = _Main(output, self._first_reader(i, output), copies, size)
        return found

    @cached_property
    def _longest_copy(self) -> int:
        """Time of the longest copy."""
        return max((int(main.copies.max()) for main in self._mains.values()), default=0)

    @cached_property
    def _most_leaving(self) -> int:
        """Most bytes that leave behind the boundary, where all of them are on the device."""
        together = sum(int(main.leaving.max()) for main in self._mains.values())
        if self._at_most.device_bytes is None:
            return together
        resident = sum(int(node.resident_bytes.min()) for node in self.model.nodes)
        return max(0, min(together, self._at_most.device_bytes - resident))

    @cached_property
    def _unit(self) -> int:
        """Bytes of one unit of leaving activations; usage is rounded down, additions to rows are rounded up."""
        return max(1, self._most_leaving // MOST_UNITS)

    @cached_property
    def _speed(self) -> Fraction:
        """Units of the fastest copy per quantum."""
        speeds = [
            Fraction(size, time * self._unit)
            for main in self._mains.values()
            for size, time in zip(main.bytes.tolist(), main.copies.tolist(), strict=True)
            if time > 0
        ]
        return max(speeds, default=Fraction(1))

    def _carried(self, times: IntArray) -> IntArray:
        """Units that a link carries at most, elementwise."""
        speed = self._speed
        found = [-(-time * speed.numerator // speed.denominator) for time in times.ravel().tolist()]
        return np.array(found, dtype=np.int64).reshape(times.shape)

    # -------------------------------------------------------------- families

    def clock(self) -> list[UsageTerm]:
        """Also for leaving activations."""
        return [*super().clock(), *self.leaving.clock()]

    def add_time(self) -> None:
        """Add the nodes that make rows longer: stalls, reruns, a head start, and bytes still leaving.

        Every level stands for all times from its price up to its addition to the rows.
        """
        if self.most_excess:
            longer = levels(self.most_excess)
            price = np.concatenate(([0], longer[:-1]))
            self.add_wait("waiting in forward", price, longer, self.outward)
            node = self.add_wait("waiting in backward", price, longer, self.inward)
            self._lengthen_leaving(node, self.leaving.all, self._carried(longer))
        for i in self.reruns:
            self._add_reruns(i)
        if self._most_leaving:
            self._add_head_start()
            self._add_leaving()

    def _add_head_start(self) -> None:
        """Add the node that chooses how long before the boundary the first late copy begins."""
        longer, rows = levels(self._longest_copy), self.outward
        used = np.concatenate(([0], longer[:-1]))
        node = self.new_node("head start", len(longer))
        self._lengthen_leaving(node, self.leaving.all, self._carried(longer))
        times = self.times.until(self.boundary, rows.events)
        long = int(np.count_nonzero(times >= used[-1]))
        self.node_usage[node] += rows.use(Span(0, long), used)
        for row in range(long, len(times)):
            self.node_usage[node] += rows.use(Span(row, row + 1), np.minimum(used, times[row]))

    def _lengthen_leaving(self, node: int, span: Span, longer: IntArray) -> None:
        """Make rows of leaving activations longer by the additions of a node's strategies, in growing order."""
        self.node_usage[node] += self.leaving.lengthen(span, int(longer[-1]), longer[-1] - longer)

    def _add_reruns(self, i: int) -> None:
        """Make rows longer by the reruns of an operator before them."""
        cost = self.model.nodes[i].cost + int(self.times.arguments[i])
        events = [self.timeline.recompute[i][moment] for moment in self.moments[i]]
        for rows, longer in ((self.inward, cost), (self.leaving, self._carried(cost))):
            first = dict(zip(self.moments[i], np.searchsorted(rows.events, events).tolist(), strict=True))
            for start, end in pairwise(sorted({*first.values(), rows.all.end})):
                runs = [sum(first[moment] <= start for moment in mode) for mode in self.reruns[i]]
                counts = (0, *runs, *(0,) * self.further_modes(i))
                most = max(counts) * int(longer.max())
                self.node_usage[i] += rows.lengthen(Span(start, end), most, self._beside(longer, counts, most))

    def _beside(self, longer: IntArray, counts: tuple[int, ...], most: int) -> IntArray:
        """Difference to ``most`` of the modes of a node, each of which adds its layout's time so many times."""
        longer = self.tables.one_of(longer)

        def make() -> IntArray:
            found: IntArray = most - np.multiply.outer(np.array(counts), longer).ravel()
            return found

        return self.tables.made_of((longer,), ("beside", *counts), make)

    def _add_leaving(self) -> None:
        """Add the nodes that choose the bytes still leaving."""
        start, rows = self.timeline.start, self.leaving
        longer = levels(-(-self._most_leaving // self._unit))
        held = self._unit * np.concatenate(([0], longer[:-1]))
        begins = start[self.boundary]
        for row, event in enumerate(rows.events.tolist()):
            node = self.new_node(f"leaving {row}", len(longer))
            ends = start[min(event + 1, len(start) - 1)]
            self.node_usage[node] += self.term(begins, ends, held)
            self._lengthen_leaving(node, Span(row, row + 1), longer)
            self.waiting[node] = LEAVING
            begins = ends

    def add_offload(self, i: int, mode: int, way: OffloadMode) -> None:
        """Add one mode of one operator; see the module docstring."""
        arrives = self._arrives(i, way)
        if arrives is None:
            self.forbid_mode(i, mode)
            return
        main, boundary = self._mains[i], self.timeline.start[self.boundary]
        read = self.timeline.burst[main.reader]
        made = self.timeline.last_time(self.timeline.compute[i])
        copies = self.in_mode(i, mode, main.copies)
        gone, on_host = 0, (boundary, boundary)
        match way:
            case OffloadMode.EARLY | OffloadMode.EARLY_SOON:
                self.node_usage[i] += self.outward.use(self.outward.up_to(self.timeline.compute[i] + 1), copies)
                self.node_usage[i] += self.inward.use(self.inward.since(arrives), copies)
                on_host = boundary, boundary + 1 if way.soon else read + 1  # a rerun may have read it by then
            case OffloadMode.LATE | OffloadMode.LATE_SOON:
                self.node_usage[i] += self.leaving.use(
                    self.leaving.all, self.in_mode(i, mode, main.leaving // self._unit)
                )
                self.node_usage[i] += self.inward.use(self.inward.since(arrives), copies)
                gone, on_host = boundary, (read, read if way.soon else read + 1)
            case OffloadMode.BRIEF:
                self.node_usage[i] += self.outward.use(self.outward.up_to(self.timeline.compute[i] + 1), copies)
        self.keep_on_host(i, mode, on_host, main.bytes)
        waiting = waiting_outputs(self.model, i)
        for output in range(self.model.nodes[i].output_bytes.shape[1]):
            amount = self.in_mode(i, mode, self.model.nodes[i].output_bytes[:, output])
            if output == main.output and gone:
                self.node_usage[i] += self.term(made, max(gone, made + 1), amount)
            else:
                self.add_life(i, made, self.lifetimes.get((i, output), UNREAD).forward, amount)
            if output == main.output:
                back = boundary if way is OffloadMode.BRIEF else self.timeline.start[arrives]
                self.add_life(i, back, self.last_life(i, output), amount)
            elif output in waiting:
                first = self.timeline.compute[self._first_reader(i, output)]
                self.add_life(i, self.timeline.start[first], self.last_life(i, output), amount)

    def _arrives(self, i: int, way: OffloadMode) -> int | None:
        """The last event that may read the main output first; None where no rerun may read it sooner."""
        last = self.timeline.compute[self._mains[i].reader]
        if not way.soon:
            return last
        first = self.model.first_backward_use[i]
        sooner = [
            self.timeline.recompute[v][moment]
            for v in self.readers[i]
            for moment in self.moments.get(v, ())
            if moment < first
        ]
        if not sooner:
            return None
        return max(sooner) if len(waiting_outputs(self.model, i)) == 1 else last

    def _first_reader(self, i: int, output: int) -> int:
        """The first backward operator that reads an output."""
        edges = self.model.edges_from[i]
        return min(
            edge.consumer
            for edge in edges
            if edge.output == output and self.model.nodes[edge.consumer].kind is NodeKind.BACKWARD
        )
