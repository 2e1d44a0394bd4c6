"""Sharding alone: Alpa's integer program with memory that is true at every moment.

One strategy per operator and per parameter, resharding cost on every edge (Alpa, OSDI 2022,
section 4.2: ``min sum_v s_v (c_v + d_v) + sum_(v,u) s_v R_vu s_u``), and beside it what Alpa leaves
out: at every operator of forward, backward and optimizer the bytes of parameters, optimizer state,
activations, gradients and resharded copies stay within the device's memory.

Where each family of terms is added:

===============================  ==============================================
resident bytes, optimizer        :meth:`StepProblemBuilder.add_resident_nodes`
cost and outputs of operators    :meth:`StepProblemBuilder.add_operators`
resharding and its copies        :meth:`StepProblemBuilder.add_edges`
gradients until their update     :meth:`StepProblemBuilder.add_gradients`
===============================  ==============================================

A value is counted from the operator that produces it until the last operator that reads it has
computed, and a resharded copy while its consumer reads; a replay that frees a value between two
resharding steps can be lower, never higher.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from formulations.models.step import NodeKind, StepModel
from formulations.problem import BoolArray, Factor, IntArray, Node, Resource, StrategyProblem, UsageTerm

MEMORY = 0
"""Index of the device-memory resource in problems built from a :class:`StepModel`."""


def build_sharding(model: StepModel, memory_limit: int | None) -> StrategyProblem:
    """Build the problem of sharding without recomputation.

    Parameters
    ----------
    model
        The step's tables.
    memory_limit
        Bytes on one device, or None.

    Returns
    -------
    StrategyProblem
        Node ``i`` is node ``i`` of the model, its strategies the layouts.
    """
    builder = StepProblemBuilder(model)
    builder.add_resident_nodes()
    builder.add_operators()
    builder.add_edges()
    builder.add_gradients()
    return builder.problem("sharding", memory_limit)


class StepProblemBuilder:
    """Collects nodes, factors and usage of a step; models with more decisions extend it."""

    def __init__(self, model: StepModel) -> None:
        self.model = model
        self.timeline = model.timeline
        self.cost: list[IntArray] = [node.cost.copy() for node in model.nodes]
        self.node_forbidden: list[BoolArray | None] = [None] * len(model.nodes)
        self.node_usage: list[list[UsageTerm]] = [[] for _ in model.nodes]
        self.names = [node.name for node in model.nodes]
        self._factor_cost: dict[tuple[int, ...], IntArray] = {}
        self._factor_forbidden: dict[tuple[int, ...], BoolArray] = {}
        self._factor_usage: dict[tuple[int, ...], list[UsageTerm]] = {}
        self.last_use_end = self._last_use_ends()

    # ---------------------------------------------------------------- tables

    def factor(
        self,
        scope: tuple[int, ...],
        cost: IntArray,
        forbidden: BoolArray | None = None,
        usage: Iterable[UsageTerm] = (),
    ) -> None:
        """Add a factor; factors over one scope are summed into one table."""
        if scope in self._factor_cost:
            self._factor_cost[scope] = self._factor_cost[scope] + cost
        else:
            self._factor_cost[scope] = cost
        if forbidden is not None and forbidden.any():
            known = self._factor_forbidden.get(scope)
            self._factor_forbidden[scope] = forbidden if known is None else known | forbidden
        self._factor_usage.setdefault(scope, []).extend(usage)

    def forbid(self, node: int, flags: BoolArray) -> None:
        """Forbid strategies of one node."""
        if flags.any():
            known = self.node_forbidden[node]
            self.node_forbidden[node] = flags if known is None else known | flags

    @staticmethod
    def term(start: int, end: int, amount: IntArray) -> list[UsageTerm]:
        """One usage term of device memory, or none where it would use nothing."""
        if start >= end or not amount.any():
            return []
        return [UsageTerm(MEMORY, start, end, amount)]

    def _last_use_ends(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Ends of the last forward and of the last use at all, per (node, output); 0 where unused."""
        ends: dict[tuple[int, int], tuple[int, int]] = {}

        def use(key: tuple[int, int], event: int, forward: bool) -> None:
            old_forward, old_any = ends.get(key, (0, 0))
            end = 2 * event + 2
            ends[key] = (max(old_forward, end) if forward else old_forward, max(old_any, end))

        nodes, timeline = self.model.nodes, self.timeline
        for edge in self.model.edges:
            forward = nodes[edge.consumer].kind is NodeKind.FORWARD
            use((edge.producer, edge.output), timeline.compute[edge.consumer], forward)
        for k, gradient in enumerate(self.model.gradients):
            use((gradient.producer, gradient.output), timeline.gradient[k], False)
        for k, result in enumerate(self.model.results):
            forward = nodes[result.producer].kind is NodeKind.FORWARD
            use((result.producer, result.output), timeline.result[k], forward)
        return ends

    # -------------------------------------------------------------- families

    def add_resident_nodes(self) -> None:
        """Add bytes of inputs, parameters and optimizer states at all times, and the updates."""
        for i, node in enumerate(self.model.nodes):
            self.node_usage[i] += self.term(0, self.timeline.horizon, node.resident_bytes)
            if node.update_bytes is not None and node.update_cost is not None:
                event = self.timeline.update[i]
                self.cost[i] = self.cost[i] + node.update_cost
                self.node_usage[i] += self.term(2 * event, 2 * event + 2, node.update_bytes)

    def add_operators(self) -> None:
        """Add the outputs of every operator from its computation to its last use."""
        for i, node in enumerate(self.model.nodes):
            if node.kind not in (NodeKind.FORWARD, NodeKind.BACKWARD):
                continue
            start = 2 * self.timeline.compute[i] + 1
            for output in range(node.output_bytes.shape[1]):
                _, end = self.last_use_end.get((i, output), (0, 0))
                self.node_usage[i] += self.term(start, max(end, start + 1), node.output_bytes[:, output])

    def add_edges(self) -> None:
        """Add resharding cost and copies of every argument, and of results brought to their layout."""
        for edge in self.model.edges:
            usage = self.copy_terms(self.timeline.compute[edge.consumer], edge.copy_bytes, edge.peak_bytes)
            self.factor((edge.producer, edge.consumer), edge.cost, edge.forbidden, usage)
        for k, result in enumerate(self.model.results):
            self.add_result(k, result.cost, result.forbidden, result.copy_bytes, result.peak_bytes)

    def add_result(
        self, index: int, cost: IntArray, forbidden: BoolArray, copy_bytes: IntArray, peak_bytes: IntArray
    ) -> None:
        """Add one result: it stays until the end of the step."""
        node = self.model.results[index].producer
        event = self.timeline.result[index]
        self.cost[node] = self.cost[node] + cost
        self.forbid(node, forbidden)
        own = self.model.nodes[node].output_bytes[:, self.model.results[index].output]
        own = np.tile(own, cost.shape[0] // own.shape[0])
        kept = np.where(copy_bytes > 0, copy_bytes, own)
        self.node_usage[node] += self.term(2 * event, 2 * event + 1, peak_bytes)
        self.node_usage[node] += self.term(2 * event + 1, 2 * event + 2, copy_bytes)
        self.node_usage[node] += self.term(2 * event + 2, self.timeline.horizon, kept)

    def add_gradients(self) -> None:
        """Add the reduction of every gradient and the bytes it holds until its parameter's update."""
        for k, gradient in enumerate(self.model.gradients):
            event = self.timeline.gradient[k]
            update_end = 2 * self.timeline.update[gradient.parameter] + 2
            own = self.model.nodes[gradient.producer].output_bytes[:, gradient.output]
            kept = np.where(gradient.copy_bytes > 0, gradient.copy_bytes, own[:, None])
            usage = [
                *self.copy_terms(event, gradient.copy_bytes, gradient.peak_bytes),
                *self.term(2 * event + 2, update_end, kept),
            ]
            self.factor((gradient.producer, gradient.parameter), gradient.cost, gradient.forbidden, usage)

    def copy_terms(self, event: int, copy_bytes: IntArray, peak_bytes: IntArray) -> list[UsageTerm]:
        """Usage of a resharding at an event: its peak while it is made, the copy while it is read."""
        return [
            *self.term(2 * event, 2 * event + 1, peak_bytes),
            *self.term(2 * event + 1, 2 * event + 2, copy_bytes),
        ]

    # --------------------------------------------------------------- problem

    def problem(self, name: str, memory_limit: int | None) -> StrategyProblem:
        """Assemble the canonical problem from everything added so far."""
        nodes = tuple(
            Node(name, cost, forbidden, tuple(usage))
            for name, cost, forbidden, usage in zip(
                self.names, self.cost, self.node_forbidden, self.node_usage, strict=True
            )
        )
        factors = tuple(
            Factor(scope, cost, self._factor_forbidden.get(scope), tuple(self._factor_usage[scope]))
            for scope, cost in self._factor_cost.items()
        )
        return StrategyProblem(
            name=name,
            nodes=nodes,
            factors=factors,
            resources=(Resource("device memory (bytes)", memory_limit),),
            horizon=self.timeline.horizon,
            seconds_per_cost=self.model.seconds_per_cost,
            time_names=self._time_names(),
        )

    def _time_names(self) -> tuple[str, ...]:
        names: list[str] = []
        for event in self.timeline.events:
            if event.kind.value in ("gradient", "result"):
                edges = self.model.gradients if event.kind.value == "gradient" else self.model.results
                subject = self.model.nodes[edges[event.index].producer].name
            else:
                subject = self.model.nodes[event.index].name
            names += [f"{event.kind.value} of {subject} (inputs)", f"{event.kind.value} of {subject}"]
        return tuple(names)
