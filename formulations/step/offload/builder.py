"""The nodes and usage of offload: modes of activations, rows of links, the clock, and stalls."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from functools import cached_property

import numpy as np

from formulations.problem.strategy_problem import BoolArray, IntArray, Resource, StrategyProblem, UsageTerm
from formulations.step.counting import Counting
from formulations.step.liveness import LastUse
from formulations.step.modes import Modes
from formulations.step.offload.links import Rows, levels
from formulations.step.offload.modes import Links, OffloadMode, offload_candidates, waiting_outputs
from formulations.step.offload.returns import add_returns
from formulations.step.offload.times import StepTimes, step_times
from formulations.step.recompute import RecomputeProblemBuilder
from formulations.step.sharding import UNREAD
from formulations.step.timeline import EventKind
from formulations.step.training_step import NodeKind, StepModel

HOST, OUTWARD, INWARD = 1, 2, 3
"""Indices of the resources besides device memory. A link's times are its rows."""

LEAD = 3
"""Lead of device memory before the use of an activation, in times of a copy, which may queue for the link."""


class OffloadProblemBuilder(RecomputeProblemBuilder):
    """Adds to recomputation the modes of offload.

    Attributes
    ----------
    waiting
        By node that makes rows longer, the link of these rows.
    """

    def __init__(self, model: StepModel, modes: Modes, counting: Counting, links: Links) -> None:
        self.links = links
        self.offloads = offload_candidates(model)
        self.waiting: dict[int, int] = {}
        super().__init__(model, modes, counting, chains=True)

    def further_modes(self, node: int) -> int:
        """Number of modes of offload of a node."""
        return len(self.links.modes) if node in self.offloads else 0

    def resources(self) -> tuple[Resource, ...]:
        """Device memory, host memory and the links."""
        memory = super().resources()
        host = Resource("host memory (bytes)", self.links.host_bytes)
        if self.links.blocking:
            return (*memory, host)
        outward = Resource("outward link (quanta)", self.outward.limit)
        return *memory, host, outward, Resource("inward link (quanta)", self.inward.limit)

    @cached_property
    def times(self) -> StepTimes:
        """Times of the events."""
        return step_times(self.model, self.timeline)

    @cached_property
    def boundary(self) -> int:
        """The first event of backward."""
        kinds = [node.kind for node in self.model.nodes]
        if NodeKind.BACKWARD not in kinds:
            return len(self.timeline.events)
        return self.burst_event(kinds.index(NodeKind.BACKWARD))

    @cached_property
    def outward(self) -> Rows:
        """Rows between events of forward and the boundary."""
        events = self.times.spread(0, self.boundary)
        return Rows(OUTWARD, events, self.times.until(self.boundary, events, self.most_excess))

    @cached_property
    def inward(self) -> Rows:
        """Rows between the boundary and events of backward."""
        events = self.times.spread(self.boundary, len(self.timeline.events))
        return Rows(INWARD, events, self.times.since(self.boundary, events, self.most_excess))

    @property
    def most_excess(self) -> int:
        """Longest additional time of more expensive layouts, as far as rows count it."""
        return 0

    def first_moment(self, node: int, mode: int) -> int:
        """The moment of a mode's first rerun; behind all operators where it has none."""
        reruns = self.reruns.get(node, ())
        return reruns[mode - 1][0] if 1 <= mode <= len(reruns) else len(self.model.nodes)

    # -------------------------------------------------------------- families

    def build(self, name: str) -> StrategyProblem:
        """Also add the returns of exposed activations."""
        if self.links.blocking:
            add_returns(self)
        return super().build(name)

    def add_operators(self) -> None:
        """Add the lives of offloaded outputs, the links and the host."""
        super().add_operators()
        for i in sorted(self.offloads):
            for k, way in enumerate(self.links.modes):
                self.add_offload(i, 1 + len(self.reruns.get(i, ())) + k, way)
        if self.offloads and not self.links.blocking:
            self.add_time()
            self.node_usage[self.new_node("clock", 1)] += self.clock()

    def clock(self) -> list[UsageTerm]:
        """Usage of the clock: the difference of each row of all links to the longest one."""
        return [*self.outward.clock(), *self.inward.clock()]

    def add_time(self) -> None:
        """Add the nodes that make rows longer."""
        costs = (self.model.nodes[i].transfer_cost for i in self.offloads)
        longest = sum(int(cost.sum(axis=1).max()) for cost in costs if cost is not None)
        if longest:
            longer = np.concatenate(([0], levels(longest)))
            self.add_wait("waiting in forward", longer, longer, self.outward)
            self.add_wait("waiting in backward", longer, longer, self.inward)

    def add_wait(self, name: str, price: IntArray, longer: IntArray, rows: Rows) -> int:
        """Add a node that chooses the time of a stall, at its price; return it."""
        node = self.new_node(name, len(price))
        self.cost[node] = price
        self.node_usage[node] += rows.lengthen(rows.all, int(longer[-1]), longer[-1] - longer)
        self.waiting[node] = rows.resource
        return node

    def add_offload(self, i: int, mode: int, way: OffloadMode) -> None:
        """Add one mode of one operator: its cost, its use of links, and its memory on device and host."""
        node, size = self.model.nodes[i], self.model.nodes[i].size
        needed = self._needed_for(i, way)
        if needed is None:
            self.forbid_mode(i, mode)
            return
        assert node.transfer_cost is not None
        waiting = waiting_outputs(self.model, i)
        copies = node.transfer_cost[:, waiting].sum(axis=1)
        arrives = self.burst_event(needed)
        if way is OffloadMode.EXPOSED:
            self.cost[i][mode * size : (mode + 1) * size] += 2 * copies
        else:
            taken = self.in_mode(i, mode, copies)
            # A copy may begin sooner, when the activation is made; counted so, searches found no better plans.
            self.node_usage[i] += self.outward.use(self.outward.up_to(self._left(i)), taken)
            self.node_usage[i] += self.inward.use(self.inward.since(arrives), taken)
        lead = 0 if way is OffloadMode.EXPOSED else LEAD
        gone, back = self.timeline.start[self._left(i)], self.taken_again(arrives, int(np.median(lead * copies)))
        self.keep_on_host(i, mode, self._on_host(i), node.output_bytes[:, waiting].sum(axis=1))
        made = self.timeline.last_time(self.timeline.compute[i])
        for output in range(node.output_bytes.shape[1]):
            amount = self.in_mode(i, mode, node.output_bytes[:, output])
            if output in waiting:
                self.node_usage[i] += self.term(made, max(gone, made + 1), amount)
                self.add_life(i, back, self.last_life(i, output), amount)
            else:
                self.add_life(i, made, self.lifetimes.get((i, output), UNREAD).forward, amount)

    def forbid_mode(self, i: int, mode: int) -> None:
        """Forbid a mode of a node."""
        self.forbid(i, self.in_mode(i, mode, np.ones(self.model.nodes[i].size, dtype=np.int64)) > 0)

    def keep_on_host(self, i: int, mode: int, times: tuple[int, int], amount: IntArray) -> None:
        """Use host memory from a time up to another; forbid what never fits."""
        held = self.in_mode(i, mode, amount)
        if self.links.host_bytes is not None:
            self.forbid(i, held > self.links.host_bytes)
        if times[0] < times[1]:
            self.node_usage[i].append(UsageTerm(HOST, *times, held))

    # ----------------------------------------------------------------- times

    @cached_property
    def readers(self) -> Mapping[int, set[int]]:
        """By activation, the readers of its offloaded outputs."""
        found = {}
        for i in self.offloads:
            waiting = waiting_outputs(self.model, i)
            found[i] = {edge.consumer for edge in self.model.edges_from[i] if edge.output in waiting}
        return found

    def _needed_for(self, i: int, way: OffloadMode) -> int | None:
        """The backward operator for whose burst an activation is back; None where no rerun may read it sooner."""
        first = self.model.first_backward_use[i]
        if not way.soon:
            return first
        return min(
            (moment for v in self.readers[i] for moment in self.moments.get(v, ()) if moment < first), default=None
        )

    def burst_event(self, operator: int) -> int:
        """The first event of a backward operator's burst."""
        return bisect_left(self.timeline.start, self.timeline.burst[operator])

    def taken_again(self, arrives: int, lead: int = 0) -> int:
        """Begin of device memory in backward: behind the last computation with such a lead to an event."""
        begins = self.times.begins
        event = int(np.searchsorted(begins, begins[arrives] - lead, side="right")) - 1
        event = min(arrives, max(event, self.boundary))
        while self.timeline.events[event - 1].kind is not EventKind.COMPUTE:
            event -= 1
        return self.timeline.start[event]

    def _on_host(self, i: int) -> tuple[int, int]:
        """Interval of an activation on the host, from its last forward use to its first backward use.

        Its copy may begin before. All that is offloaded is there at the boundary, so that changes no peak.
        """
        first = self.timeline.compute[self.model.first_backward_use[i]]
        return self.timeline.start[self._left(i)], self.timeline.last_time(first) + 1

    def _left(self, i: int) -> int:
        """The event behind an operator's last use in forward."""
        kinds = self.model.nodes
        uses = (edge.consumer for edge in self.model.edges_from[i] if kinds[edge.consumer].kind is NodeKind.FORWARD)
        return self.timeline.compute[max(uses, default=i)] + 1

    # ---------------------------------------------------------------- orders

    def out_of_order(self, u: int, v: int) -> BoolArray:
        """Also pairs where ``v`` would run again before ``u`` has come back."""
        late = super().out_of_order(u, v)
        if u not in self.offloads or v not in self.readers[u]:
            return late
        sizes = self.model.nodes[u].size, self.model.nodes[v].size
        for k, way in enumerate(self.links.modes, start=1 + len(self.reruns.get(u, ()))):
            if way.soon or way in (OffloadMode.BRIEF, OffloadMode.EXPOSED):
                continue
            away = slice(k * sizes[0], (k + 1) * sizes[0])
            for b, moments in enumerate(self.reruns.get(v, ()), start=1):
                if moments[0] < self.model.first_backward_use[u]:
                    late[away, b * sizes[1] : (b + 1) * sizes[1]] = True
        return late

    def further_lives(self, u: int, output: int) -> list[LastUse | None]:
        """Last direct use of an output; outputs that backward does not read stay on the device."""
        return [self.lifetimes.get((u, output), UNREAD).last] * self.further_modes(u)
