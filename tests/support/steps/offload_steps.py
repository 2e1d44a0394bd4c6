"""Random steps whose activations may wait on the host: every decision over them, and their exact execution.

Shares no code with the problems: memory is that of the execution without offload less what is away, and time
that of one compute clock and one or two links, as :mod:`planner.schedule.instructions` defines them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product

import numpy as np
from support.steps.random_steps import random_step, reads_last_copies

from formulations.step.kiwi_chain import chain_moments
from formulations.step.modes import once_or_twice
from formulations.step.offload.modes import offload_candidates
from formulations.step.replay import BrokenDecisionError, StepReplay, replay_decision
from formulations.step.timeline import EventKind
from formulations.step.training_step import NodeKind, StepDecision, StepModel, StepNode


@dataclass(frozen=True, slots=True)
class HostStay:
    """When an activation is away, each time as the node whose computation has just ended.

    Parameters
    ----------
    leaves_after, gone_after
        When its copy to the host starts, and when its memory is free.
    returns_after
        When its memory is taken again and the copy back starts.
    """

    leaves_after: int
    gone_after: int
    returns_after: int


Stays = Mapping[int, HostStay]
"""Of every offloaded operator."""


def offload_step(seed: int, forward: int = 3, layouts: int = 1) -> StepModel:
    """A random step; most forward operators have copies, between free and longer than the step.

    In some steps forward or backward takes no time, so that copies have to fit into the other.
    """
    rng = random.Random(seed)
    model = random_step(seed, forward, layouts)
    slowest = rng.choice([1, 4, 12, 40])
    timeless = rng.choice([None, None, NodeKind.FORWARD, NodeKind.BACKWARD])

    def priced(node: StepNode) -> StepNode:
        if node.kind is timeless:
            node = replace(node, cost=np.zeros_like(node.cost))
        if node.kind is not NodeKind.FORWARD or rng.random() < 0.1:
            return node
        copies = [[rng.randint(0, slowest) if amount else 0 for amount in row] for row in node.output_bytes.tolist()]
        return replace(node, transfer_cost=np.array(copies, dtype=np.int64))

    return replace(model, nodes=tuple(priced(node) for node in model.nodes))


@dataclass(frozen=True, slots=True)
class Execution:
    """Cost of a decision (stalls included), what it waited, and its peaks on the device and on the host."""

    cost: int
    stall: int
    peak: int
    host_peak: int


def waiting_outputs(model: StepModel, node: int) -> list[int]:
    """Outputs that backward operators read: those are what an offload moves."""
    edges = model.edges_from[node]
    return sorted({e.output for e in edges if model.nodes[e.consumer].kind is NodeKind.BACKWARD})


def last_forward_use(model: StepModel, node: int) -> int:
    """The node's last reader in forward, or itself."""
    readers = (edge.consumer for edge in model.edges_from[node])
    return max((i for i in readers if model.nodes[i].kind is NodeKind.FORWARD), default=node)


def stays(model: StepModel, node: int) -> Iterator[HostStay]:
    """Every possible stay of a node."""
    first, used = model.first_backward_use[node], last_forward_use(model, node)
    for leaves in range(node, first):
        for gone in range(max(leaves, used), first):
            for returns in range(gone, first):
                yield HostStay(leaves, gone, returns)


def all_decisions(model: StepModel) -> Iterator[tuple[StepDecision, Stays]]:
    """Every combination of layouts, reruns and stays, also those that cannot be executed."""
    modes, candidates = once_or_twice(model, chain_moments(model)), offload_candidates(model)
    nodes = sorted({*modes, *candidates})
    ways = [(None, *modes.get(i, ()), *(stays(model, i) if i in candidates else ())) for i in nodes]
    for layouts in product(*(range(node.size) for node in model.nodes)):
        for chosen in product(*ways):
            decided = list(zip(nodes, chosen, strict=True))
            away = {i: way for i, way in decided if isinstance(way, HostStay)}
            again = {i: way for i, way in decided if isinstance(way, tuple)}
            yield StepDecision(layouts, again, frozenset(away)), away


def execute(
    model: StepModel, decision: StepDecision, away: Stays, replay: StepReplay, *, shared: bool, blocking: bool
) -> Execution:
    """Execute a decision, given the replay of the same decision without offload.

    Parameters
    ----------
    model, decision, replay
        What is executed.
    away
        When its activations are away.
    shared, blocking
        Whether both directions share one link, and whether the computation waits for every copy.

    Raises
    ------
    BrokenDecisionError
        A rerun reads an activation that has not come back yet.
    """
    for edge in model.edges:
        moments, stay = decision.recomputed.get(edge.consumer), away.get(edge.producer)
        if moments is None or stay is None or edge.output not in waiting_outputs(model, edge.producer):
            continue
        if moments[0] <= stay.returns_after:
            raise BrokenDecisionError("a rerun reads what is away")
    return _Execution(model, decision, away, replay, shared=shared, blocking=blocking).run()


class _Execution:
    def __init__(
        self, model: StepModel, decision: StepDecision, away: Stays, replay: StepReplay, *, shared: bool, blocking: bool
    ) -> None:
        self.model, self.decision, self.shared, self.blocking = model, decision, shared, blocking
        self.timeline = replay.timeline
        self.usage = replay.usage.copy()
        self.host = np.zeros_like(self.usage)
        self.clock = self.stall = 0
        self.link = {"out": 0, "in": 0}
        self.leaving: dict[tuple[int, int], int] = {}
        self.back: dict[tuple[int, int], int] = {}
        """When copies end, by output."""
        self.away = {(u, k): stay for u, stay in away.items() for k in waiting_outputs(model, u)}

    def run(self) -> Execution:
        for (u, k), stay in self.away.items():
            amount = int(self.model.nodes[u].output_bytes[self.decision.layouts[u], k])
            leaves, gone, returns = map(self._behind, (stay.leaves_after, stay.gone_after, stay.returns_after))
            self.usage[gone:returns] -= amount
            self.host[leaves : self._first_read(u, k)] += amount
        for event in self.timeline.events:
            match event.kind:
                case EventKind.COMPUTE:
                    self._compute(event.index)
                    self._copies_behind(event.index)
                case EventKind.RECOMPUTE:
                    self._compute(event.index)
                case EventKind.GRADIENT:
                    edge = self.model.gradients[event.index]
                    self.clock += int(edge.cost[self._layout(edge.producer), self._layout(edge.parameter)])
                case EventKind.RESULT:
                    result = self.model.results[event.index]
                    self.clock += int(result.cost[self._layout(result.producer)])
                case EventKind.UPDATE:
                    self.clock += int(self.model.nodes[event.index].update_cost[self._layout(event.index)])
        return Execution(self.clock, self.stall, int(self.usage.max()), int(self.host.max()))

    def _layout(self, node: int) -> int:
        return self.decision.layouts[node]

    def _behind(self, node: int) -> int:
        return self.timeline.start[self.timeline.compute[node] + 1]

    def _first_read(self, u: int, k: int) -> int:
        """End of the first read of an output in backward, by whoever reads it."""
        ends = []
        for edge in self.model.edges_from[u]:
            if edge.output == k:
                v = edge.consumer
                events = [self.timeline.recompute[v][moment] for moment in self.decision.recomputed.get(v, ())]
                if self.model.nodes[v].kind is NodeKind.BACKWARD:
                    events.append(self.timeline.compute[v])
                for event in events:
                    argument = self.timeline.argument_time(event, edge.slot) + 1
                    ends.append(argument if self._is_copied(edge) else self.timeline.last_time(event) + 1)
        return min(ends)

    def _is_copied(self, edge) -> bool:
        return bool(edge.copy_bytes[self._layout(edge.producer), self._layout(edge.consumer)])

    def _compute(self, v: int) -> None:
        arguments = sorted((edge for edge in self.model.edges if edge.consumer == v), key=lambda edge: edge.slot)
        for edge in arguments:
            if self._is_copied(edge):
                self._wait(self.back.get((edge.producer, edge.output), 0))
            self.clock += int(edge.cost[self._layout(edge.producer), self._layout(v)])
        for edge in arguments:
            self._wait(self.back.get((edge.producer, edge.output), 0))
        self.clock += int(self.model.nodes[v].cost[self._layout(v)])

    def _copies_behind(self, node: int) -> None:
        for key in sorted(self.away):
            if self.away[key].leaves_after == node:
                self.leaving[key] = self._copy(key, "out", 0)
        for key in sorted(self.away):
            if self.away[key].gone_after == node:
                self._wait(self.leaving[key])
        for key in sorted(self.away):
            if self.away[key].returns_after == node:
                self.back[key] = self._copy(key, "in", self.leaving[key])

    def _copy(self, key: tuple[int, int], way: str, ready: int) -> int:
        u, k = key
        copies = self.model.nodes[u].transfer_cost
        assert copies is not None
        way = "out" if self.shared else way
        ends = max(self.clock, self.link[way], ready) + int(copies[self._layout(u), k])
        self.link[way] = ends
        if self.blocking:
            self._wait(ends)
        return ends

    def _wait(self, until: int) -> None:
        waited = max(0, until - self.clock)
        self.clock += waited
        self.stall += waited


def executions(
    model: StepModel, *, shared: bool = False, blocking: bool = False
) -> Iterator[tuple[StepDecision, Stays, Execution]]:
    """Every decision of the problem that can be executed, with its stays and its execution."""
    replays: dict[tuple[object, ...], StepReplay | None] = {}
    twice = {i for i, modes in once_or_twice(model, chain_moments(model)).items() if len(modes[-1]) > 1}
    for decision, away in all_decisions(model):
        if not reads_last_copies(model, decision, but=twice):
            continue
        key = decision.layouts, tuple(sorted(decision.recomputed.items()))
        if key not in replays:
            try:
                replays[key] = replay_decision(model, replace(decision, offloaded=frozenset()))
            except BrokenDecisionError:
                replays[key] = None
        replay = replays[key]
        if replay is None:
            continue
        try:
            yield decision, away, execute(model, decision, away, replay, shared=shared, blocking=blocking)
        except BrokenDecisionError:
            continue
