"""The nodes and usage of offload: modes of activations, rows of links, the clock, and what waits."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property

import numpy as np

from formulations.models.counting import Counting
from formulations.models.liveness import LastUse
from formulations.models.modes import Modes
from formulations.models.offload_links import LinkRows, Span, waits
from formulations.models.offload_modes import Links, OffloadMode, offload_candidates, waiting_outputs
from formulations.models.recompute import RecomputeProblemBuilder
from formulations.models.sharding import UNREAD
from formulations.models.step import NodeKind, StepModel
from formulations.models.timeline import EventKind
from formulations.problem import BoolArray, IntArray, Resource, UsageTerm

HOST, OUTWARD, INWARD = 1, 2, 3
"""Indices of the resources besides device memory. A link's times are its rows."""

LEAD = 3
"""Copies' times before its use that an activation takes its memory again: it may have to queue for the link."""


class OffloadProblemBuilder(RecomputeProblemBuilder):
    """Adds to recomputation the modes of offload."""

    def __init__(self, model: StepModel, modes: Modes, counting: Counting, links: Links) -> None:
        self.links = links
        self.offloads = offload_candidates(model)
        self.waiting: dict[int, int] = {}
        super().__init__(model, modes, counting, chains=True)

    def further_modes(self, node: int) -> int:
        """Number of modes of offload of a node."""
        return len(self.links.modes) if node in self.offloads else 0

    def resources(self, memory_limit: int | None) -> tuple[Resource, ...]:
        """Device memory, host memory and the links."""
        memory = super().resources(memory_limit)
        host = Resource("host memory (bytes)", self.links.host_bytes)
        if self.links.blocking:
            return (*memory, host)
        forward, backward = self._rows.forward_time + self._longest_wait, self._rows.backward_time
        if self.links.relaxed:
            forward += min(self._beyond_least, self._dearest_forward() - self._rows.forward_time)
            backward += self._beyond_least
        else:
            backward += self._longest_wait
        return *memory, host, Resource("outward link (quanta)", forward), Resource("inward link (quanta)", backward)

    @cached_property
    def _rows(self) -> LinkRows:
        """Where the rows of the links stand: events begin when the operators before them have taken their least."""
        least = [
            int(self.model.nodes[event.index].cost.min()) if event.kind is EventKind.COMPUTE else 0
            for event in self.timeline.events
        ]
        kinds = [node.kind for node in self.model.nodes]
        boundary = len(least)
        if NodeKind.BACKWARD in kinds:
            boundary = self._burst_event(kinds.index(NodeKind.BACKWARD))
        return LinkRows(np.concatenate(([0], np.cumsum(least, dtype=np.int64))), boundary)

    @cached_property
    def _beyond_least(self) -> int:
        """What the best plan known takes beyond the least time of all operators."""
        assert self.links.best_known is not None, "only the relaxation knows a plan"
        return max(0, self.links.best_known - int(self._rows.begins[-1]))

    @cached_property
    def _longest_wait(self) -> int:
        """In the relaxation what the best plan known may wait at most; else what all copies take together."""
        if self.links.relaxed:
            return self._beyond_least
        costs = (self.model.nodes[i].transfer_cost for i in self.offloads)
        return sum(int(cost.sum(axis=1).max()) for cost in costs if cost is not None)

    def _dearest_forward(self) -> int:
        """Most time that layouts let forward take."""
        own = sum(int(node.cost.max()) for node in self.model.nodes if node.kind is NodeKind.FORWARD)
        arguments = sum(int(edge.cost.max()) for edge in self.model.edges if self._is_forward(edge.consumer))
        return own + arguments + sum(int(result.cost.max()) for result in self.model.results)

    # -------------------------------------------------------------- families

    def add_operators(self) -> None:
        """Add the lives of offloaded outputs, the links and the host."""
        super().add_operators()
        for i in sorted(self.offloads):
            for k, way in enumerate(self.links.modes):
                self._add_offload(i, 1 + len(self.reruns.get(i, ())) + k, way)
        if self.offloads and not self.links.blocking:
            self._add_time()

    def _add_time(self) -> None:
        """Add the clock, and what waits."""
        rows = self._rows
        self.node_usage[self.new_node("clock", 1)] += rows.clock(OUTWARD, INWARD)
        self._add_wait("waiting in forward", OUTWARD, Span(0, len(rows.outward)))
        if not self.links.relaxed:
            self._add_wait("waiting in backward", INWARD, Span(0, len(rows.inward)))

    def _add_wait(self, name: str, link: int, rows: Span) -> None:
        """Add a node that chooses how long something waits.

        In the relaxation every choice stands for all waiting from its price up to what it makes the rows longer.
        """
        if not self._longest_wait:
            return
        longer = waits(self._longest_wait)
        price = np.concatenate(([0], longer))
        if self.links.relaxed:
            price = price[:-1]
        else:
            longer = price
        node = self.new_node(name, len(price))
        self.cost[node] = price
        self.node_usage[node].append(UsageTerm(link, rows.first, rows.end, longer[-1] - longer))
        self.waiting[node] = link

    def _add_offload(self, i: int, mode: int, way: OffloadMode) -> None:
        """Add one mode of one operator: what it costs, reserves, and holds on either side."""
        node, size = self.model.nodes[i], self.model.nodes[i].size
        needed = self._needed_for(i, way)
        if needed is None:
            self.forbid(i, self.in_mode(i, mode, np.ones(size, dtype=np.int64)) > 0)
            return
        assert node.transfer_cost is not None
        waiting = waiting_outputs(self.model, i)
        copies = node.transfer_cost[:, waiting].sum(axis=1)
        on_host = self.in_mode(i, mode, node.output_bytes[:, waiting].sum(axis=1))
        boundary = self.timeline.start[self._rows.boundary]
        arrives = self._burst_event(needed)
        gone, back = 0, self.timeline.start[arrives if way.soon else self.timeline.compute[needed]]
        on_host_from, on_host_until = boundary, self.timeline.burst[needed] + 1
        match way:
            case OffloadMode.AWAY | OffloadMode.AWAY_SOON:
                self._spend(i, mode, OUTWARD, self._rows.leaving(self._left(i)), copies)
                self._spend(i, mode, INWARD, self._rows.returning(arrives), copies)
                gone, back = self.timeline.start[self._left(i)], self._taken_again(arrives, LEAD * copies)
                on_host_from, on_host_until = self._on_host(i)
            case OffloadMode.EXPOSED:
                self.cost[i][mode * size : (mode + 1) * size] += 2 * copies
                gone, back = self.timeline.start[self._left(i)], self._taken_again(arrives, 0 * copies)
                on_host_from, on_host_until = self._on_host(i)
            case OffloadMode.EARLY | OffloadMode.EARLY_SOON:
                self._spend(i, mode, OUTWARD, self._rows.leaving(self.timeline.compute[i] + 1), copies)
                self._spend(i, mode, INWARD, self._rows.returning(arrives), copies)
                if way.soon:  # how much sooner it may be read, another rerun says
                    on_host_until = boundary + 1
            case OffloadMode.LATE | OffloadMode.LATE_SOON:
                self._spend(i, mode, INWARD, self._rows.returning(arrives), copies)
                gone, on_host_from = boundary, self.timeline.burst[needed]
                if way.soon:
                    on_host_from = on_host_until
            case OffloadMode.BRIEF:
                self._spend(i, mode, OUTWARD, self._rows.leaving(self.timeline.compute[i] + 1), copies)
                back, on_host_from = boundary, on_host_until
        if self.links.host_bytes is not None:
            self.forbid(i, on_host > self.links.host_bytes)
        if on_host_from < on_host_until:
            self.node_usage[i].append(UsageTerm(HOST, on_host_from, on_host_until, on_host))
        made = self.timeline.last_time(self.timeline.compute[i])
        for output in range(node.output_bytes.shape[1]):
            amount = self.in_mode(i, mode, node.output_bytes[:, output])
            if output in waiting and gone:
                self.node_usage[i] += self.term(made, max(gone, made + 1), amount)
            else:
                self.add_life(i, made, self.lifetimes.get((i, output), UNREAD).forward, amount)
            if output in waiting:
                self.add_life(i, back, self.last_life(i, output), amount)

    def _spend(self, i: int, mode: int, link: int, rows: Span, copies: IntArray) -> None:
        """Use rows of a link."""
        if rows.first < rows.end:
            self.node_usage[i].append(UsageTerm(link, rows.first, rows.end, self.in_mode(i, mode, copies)))

    # ----------------------------------------------------------------- times

    @cached_property
    def _readers(self) -> Mapping[int, set[int]]:
        """By activation, who reads what is away of it."""
        found = {}
        for i in self.offloads:
            waiting = waiting_outputs(self.model, i)
            found[i] = {edge.consumer for edge in self.model.edges_from[i] if edge.output in waiting}
        return found

    def _needed_for(self, i: int, way: OffloadMode) -> int | None:
        """The backward operator in whose burst an activation is back; None where no rerun may read it sooner.

        The first that may read it in the problem that finds plans, the last of those before its first backward use
        in the relaxation.
        """
        first = self.model.first_backward_use[i]
        if not way.soon:
            return first
        sooner = [moment for v in self._readers[i] for moment in self.moments.get(v, ()) if moment < first]
        if not sooner:
            return None
        return min(sooner) if way is OffloadMode.AWAY_SOON else max(sooner)

    def _burst_event(self, operator: int) -> int:
        """The first event of a backward operator's burst."""
        return int(np.searchsorted(self.timeline.start, self.timeline.burst[operator]))

    def _taken_again(self, arrives: int, lead: IntArray) -> int:
        """Time right behind a computation of backward from which there is such a lead to an event, of most layouts."""
        begins = self._rows.begins
        event = int(np.searchsorted(begins, begins[arrives] - int(np.median(lead)), side="right")) - 1
        event = min(arrives, max(event, self._rows.boundary))
        while self.timeline.events[event - 1].kind is not EventKind.COMPUTE:
            event -= 1
        return self.timeline.start[event]

    def _on_host(self, i: int) -> tuple[int, int]:
        """When an activation is on the host at most: from its last forward use to its first backward use."""
        first = self.timeline.compute[self.model.first_backward_use[i]]
        return self.timeline.start[self._left(i)], self.timeline.last_time(first) + 1

    def _left(self, i: int) -> int:
        """The event behind an operator's last use in forward."""
        uses = [edge.consumer for edge in self.model.edges_from[i] if self._is_forward(edge.consumer)]
        return self.timeline.compute[max(uses, default=i)] + 1

    def _is_forward(self, node: int) -> bool:
        return self.model.nodes[node].kind is NodeKind.FORWARD

    # ---------------------------------------------------------------- orders

    def out_of_order(self, u: int, v: int) -> BoolArray:
        """Also pairs where ``v`` would run again before ``u`` has come back."""
        late = super().out_of_order(u, v)
        if u not in self.offloads or v not in self._readers[u]:
            return late
        sizes = self.model.nodes[u].size, self.model.nodes[v].size
        for k, way in enumerate(self.links.modes, start=1 + len(self.reruns.get(u, ()))):
            if way.soon or way is OffloadMode.BRIEF:
                continue
            away = slice(k * sizes[0], (k + 1) * sizes[0])
            for b, moments in enumerate(self.reruns.get(v, ()), start=1):
                if moments[0] < self.model.first_backward_use[u]:
                    late[away, b * sizes[1] : (b + 1) * sizes[1]] = True
        return late

    def further_lives(self, u: int, output: int) -> list[LastUse | None]:
        """Last direct use of an output: what backward does not read stays on the device."""
        return [self.lifetimes.get((u, output), UNREAD).last] * self.further_modes(u)
