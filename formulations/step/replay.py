"""Cost and memory of a decision over a step, by executing its events one by one.

This defines the semantics of a :class:`~formulations.step.training_step.StepDecision`; the problems that the models
build must agree with it. It shares no code with them: it tracks versions of outputs and their last reads, no intervals.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from formulations.problem.strategy_problem import IntArray
from formulations.step.timeline import Event, EventKind, Timeline, build_timeline
from formulations.step.training_step import NodeKind, StepDecision, StepEdge, StepModel
from formulations.step.weights import StepWeights


class BrokenDecisionError(ValueError):
    """A decision that cannot be executed; the message names the nodes and the reason."""


class Tally:
    """Costs of an executed decision by kind and by the operator at which they are paid, in quanta.

    Attributes
    ----------
    computation, resharding
        Operators, and resharded activations and results, shape ``(nodes,)``.
    activations, gathers, reductions
        Link time per mesh axis, as in :class:`~formulations.step.weights.StepWeights`, shape ``(axes, nodes)``; no axes
        where the model has no times on links.
    updates
        All updates.
    """

    def __init__(self, nodes: int, axes: int) -> None:
        self.computation, self.resharding = (np.zeros(nodes, dtype=np.int64) for _ in range(2))
        self.activations, self.gathers, self.reductions = (np.zeros((axes, nodes), dtype=np.int64) for _ in range(3))
        self.updates = 0

    def weigh(self, weights: StepWeights) -> int:
        """Sum of the costs times their weights."""
        pairs = (
            (self.computation, weights.computation),
            (self.resharding, weights.resharding),
            (self.activations, weights.activations),
            (self.gathers, weights.gathers),
            (self.reductions, weights.reductions),
        )
        return weights.updates * self.updates + sum(int((mine * weight).sum()) for mine, weight in pairs)


@dataclass(frozen=True, slots=True, eq=False)
class StepReplay:
    """Cost and memory of a decision.

    Parameters
    ----------
    cost
        Sum over all executions, reshardings and updates, in quanta; by the weights of the model where it has some.
    usage
        Bytes on one device at every time of ``timeline``.
    timeline
        Events of this decision; all of them happen.
    tally
        The costs by when they are paid.
    """

    cost: int
    usage: IntArray
    timeline: Timeline
    tally: Tally

    @property
    def peak(self) -> int:
        """Most bytes at any time."""
        return int(self.usage.max(initial=0))


def replay_decision(model: StepModel, decision: StepDecision) -> StepReplay:
    """Execute a decision.

    Raises
    ------
    BrokenDecisionError
        A forbidden pair of layouts.
    """
    return _Execution(model, decision).run()


@dataclass(slots=True)
class _Version:
    """One version of an output: bytes, when it was made, and the end of its last read."""

    amount: int
    made: int
    until: int


class _Execution:
    def __init__(self, model: StepModel, decision: StepDecision) -> None:
        self.model = model
        self.layout = decision.layouts
        self.timeline = build_timeline(model, decision.recomputed)
        self.change = np.zeros(self.timeline.horizon + 1, dtype=np.int64)
        self.cost = 0
        links = [*(edge.link_cost for edge in model.edges), *(edge.link_cost for edge in model.gradients)]
        self.tally = Tally(len(model.nodes), max((len(link) for link in links if link is not None), default=0))
        self.moment = {at: moment for reruns in self.timeline.recompute for moment, at in reruns.items()}
        self.current: dict[tuple[int, int], _Version] = {}
        self.edges_into: list[list[StepEdge]] = [[] for _ in model.nodes]
        for edge in model.edges:
            self.edges_into[edge.consumer].append(edge)
        self.updated: Mapping[int, int] = {
            i: self.timeline.last_time(event) + 1 for i, event in enumerate(self.timeline.update) if event >= 0
        }

    def run(self) -> StepReplay:
        for i, node in enumerate(self.model.nodes):
            self._hold(0, self.timeline.horizon, int(node.resident_bytes[self.layout[i]]))
        for position, event in enumerate(self.timeline.events):
            paid_at = self.moment.get(position, event.index)
            self._execute(event, self.timeline.start[position], self.timeline.start[position + 1], paid_at)
        for version in self.current.values():
            self._hold(version.made, version.until, version.amount)
        cost = self.cost if self.model.weights is None else self.tally.weigh(self.model.weights)
        return StepReplay(cost, np.cumsum(self.change)[:-1], self.timeline, self.tally)

    def _hold(self, start: int, end: int, amount: int) -> None:
        if start < end:
            self.change[start] += amount
            self.change[end] -= amount

    def _read(self, producer: int, output: int, until: int) -> None:
        version = self.current.get((producer, output))
        if version is not None:
            version.until = max(version.until, until)

    def _execute(self, event: Event, start: int, end: int, paid_at: int) -> None:
        match event.kind:
            case EventKind.COMPUTE | EventKind.RECOMPUTE:
                self._compute(event, start, end, paid_at)
            case EventKind.GRADIENT:
                self._reduce_gradient(event.index, start)
            case EventKind.RESULT:
                self._deliver_result(event.index, start)
            case EventKind.UPDATE:
                node, at = self.model.nodes[event.index], self.layout[event.index]
                assert node.update_cost is not None
                assert node.update_bytes is not None
                self.cost += int(node.update_cost[at])
                self.tally.updates += int(node.update_cost[at])
                self._hold(start, end, int(node.update_bytes[at]))

    def _compute(self, event: Event, start: int, end: int, paid_at: int) -> None:
        """Bring every argument to its layout, then compute; outputs become the newest versions."""
        v = event.index
        node, at = self.model.nodes[v], self.layout[v]
        for edge in self.edges_into[v]:
            pair = self.layout[edge.producer], at
            self._allow(not edge.forbidden[pair], self.model.nodes[edge.producer].name, node.name)
            self.cost += int(edge.cost[pair])
            given = self.model.nodes[edge.producer].kind in (NodeKind.PARAMETER, NodeKind.INPUT)
            if not given:
                self.tally.resharding[paid_at] += int(edge.cost[pair])
            if edge.link_cost is not None:
                links = self.tally.gathers if given else self.tally.activations
                links[:, paid_at] += edge.link_cost[:, *pair]
            made, copy = start + edge.slot, int(edge.copy_bytes[pair])
            self._read(edge.producer, edge.output, made + 1 if copy else end)
            self._hold(made, made + 1, int(edge.peak_bytes[pair]))
            self._hold(made + 1, end, copy)
        self.cost += int(node.cost[at])
        self.tally.computation[paid_at] += int(node.cost[at])
        if node.workspace_bytes is not None:
            self._hold(end - 1, end, int(node.workspace_bytes[at]))
        for output, amount in enumerate(node.output_bytes[at].tolist()):
            older = self.current.get((v, output))
            if older is not None:
                self._hold(older.made, older.until, older.amount)
            self.current[v, output] = _Version(amount, end - 1, end)

    def _allow(self, allowed: bool, producer: str, consumer: str) -> None:
        if not allowed:
            raise BrokenDecisionError(f"the layouts of {producer} and {consumer} are a forbidden pair")

    def _reduce_gradient(self, k: int, time: int) -> None:
        gradient = self.model.gradients[k]
        pair = self.layout[gradient.producer], self.layout[gradient.parameter]
        names = self.model.nodes[gradient.producer].name, self.model.nodes[gradient.parameter].name
        self._allow(not gradient.forbidden[pair], *names)
        self.cost += int(gradient.cost[pair])
        if gradient.link_cost is not None:
            self.tally.reductions[:, gradient.producer] += gradient.link_cost[:, *pair]
        self._hold(time, time + 1, int(gradient.peak_bytes[pair]))
        self._keep(gradient.producer, gradient.output, time, int(gradient.copy_bytes[pair]), gradient.parameter)

    def _deliver_result(self, k: int, time: int) -> None:
        result = self.model.results[k]
        at = self.layout[result.producer]
        self._allow(not result.forbidden[at], self.model.nodes[result.producer].name, "the result")
        self.cost += int(result.cost[at])
        self.tally.resharding[result.producer] += int(result.cost[at])
        self._hold(time, time + 1, int(result.peak_bytes[at]))
        self._keep(result.producer, result.output, time, int(result.copy_bytes[at]), None)

    def _keep(self, producer: int, output: int, time: int, copy: int, parameter: int | None) -> None:
        """Keep a gradient until its parameter's update, a result until the end: a copy, or the storage itself."""
        end = self.timeline.horizon if parameter is None else self.updated[parameter]
        self._read(producer, output, time + 1 if copy else end)
        self._hold(time + 1, end, copy)
