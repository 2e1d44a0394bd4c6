"""Sharding alone: Alpa's integer program with exact memory at every moment.

One strategy per operator and per parameter, resharding cost on every edge (Alpa, OSDI 2022,
section 4.2: ``min sum_v s_v (c_v + d_v) + sum_(v,u) s_v R_vu s_u``), and beside it what Alpa leaves
out: at every operator of forward, backward and optimizer the bytes of parameters, optimizer state,
activations, gradients and resharded copies stay within the device's memory.

Where each family of terms is added:

===============================  ==============================================
resident bytes, optimizer        :meth:`StepProblemBuilder.add_resident_nodes`
cost, outputs and workspaces     :meth:`StepProblemBuilder.add_operators`
resharding and its copies        :meth:`StepProblemBuilder.add_edges`
loss and updated buffers         :meth:`StepProblemBuilder.add_results`
gradients until their update     :meth:`StepProblemBuilder.add_gradients`
===============================  ==============================================
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from formulations.problem.gc_pause import gc_paused
from formulations.problem.strategy_problem import (
    BoolArray,
    Factor,
    IntArray,
    Node,
    Resource,
    StrategyProblem,
    UsageTerm,
)
from formulations.step.counting import Counting
from formulations.step.equal_tables import EqualTables
from formulations.step.liveness import LastUse, Lifetime, lifetimes
from formulations.step.timeline import EventKind, Timeline, build_timeline
from formulations.step.training_step import GradientEdge, NodeKind, StepModel
from formulations.step.weights import (
    argument_weights,
    execution_price,
    gradient_price,
    result_price,
    update_price,
    weighted,
)

MEMORY = 0
"""Index of the device-memory resource in problems built from a :class:`StepModel`."""

UNREAD = Lifetime(None, None)


def within(problem: StrategyProblem, memory_limit: int | None) -> StrategyProblem:
    """Return the problem of a step under a memory limit, in bytes of one device; None for no limit."""
    memory = replace(problem.resources[MEMORY], limit=memory_limit)
    return replace(problem, resources=(memory, *problem.resources[MEMORY + 1 :]))


@dataclass(frozen=True, slots=True, eq=False)
class CopiedByLastReader:
    """From ``start`` to ``end`` the last reader of an output computes, and the pairs of layouts with a copy."""

    reader: int
    start: int
    end: int
    tables: BoolArray


@gc_paused()
def build_sharding(model: StepModel, counting: Counting = Counting.OVER) -> StrategyProblem:
    """Build the problem of sharding without recomputation.

    Parameters
    ----------
    model
        The step's tables.
    counting
        How bytes are counted where they depend on three decisions.

    Returns
    -------
    StrategyProblem
        Node ``i`` is node ``i`` of the model, its strategies the layouts.
    """
    return StepProblemBuilder(model, build_timeline(model, {}), counting).build("sharding")


class StepProblemBuilder:
    """Collects nodes, factors and usage of a step; models with more decisions extend it.

    Parameters
    ----------
    model
        The step's tables.
    timeline
        Events of the step and their times.
    counting
        How a result or gradient that lives on in its producer's storage is counted while its last reader
        computes on a copy.
    """

    def __init__(self, model: StepModel, timeline: Timeline, counting: Counting = Counting.OVER) -> None:
        self.model = model
        self.timeline = timeline
        self.tables = EqualTables()
        self.lifetimes = lifetimes(model, timeline, self.tables)
        kept = Counter([(edge.producer, edge.output) for edge in model.gradients])
        kept.update((edge.producer, edge.output) for edge in model.results)
        self.counting = counting
        self.lives_on = {
            output
            for output, count in kept.items()
            if counting is Counting.OVER or (counting is Counting.EXACT and count > 1)
        }
        self.cost: list[IntArray] = [execution_price(model, i, (i,)) for i in range(len(model.nodes))]
        self.node_forbidden: list[BoolArray | None] = [None] * len(model.nodes)
        self.node_usage: list[list[UsageTerm]] = [[] for _ in model.nodes]
        self.names = [node.name for node in model.nodes]
        self._factor_cost: dict[tuple[int, ...], IntArray] = {}
        self._factor_forbidden: dict[tuple[int, ...], BoolArray] = {}
        self._factor_usage: dict[tuple[int, ...], list[UsageTerm]] = {}

    def build(self, name: str) -> StrategyProblem:
        """Add every family and assemble the problem, which has no memory limit."""
        self.add_resident_nodes()
        self.add_operators()
        self.add_edges()
        self.add_results()
        self.add_gradients()
        return self._problem(name)

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
        if forbidden is not None and np.count_nonzero(forbidden):
            known = self._factor_forbidden.get(scope)
            self._factor_forbidden[scope] = forbidden if known is None else known | forbidden
        self._factor_usage.setdefault(scope, []).extend(usage)

    def pair_usage(self, scope: tuple[int, int], usage: list[UsageTerm]) -> None:
        """Add usage to a pair of nodes at no cost."""
        if not usage:
            return
        if scope not in self._factor_cost:
            self._factor_cost[scope] = np.zeros(usage[0].amount.shape, dtype=np.int64)
        self._factor_usage.setdefault(scope, []).extend(usage)

    def forbid(self, node: int, flags: BoolArray) -> None:
        """Forbid strategies of one node."""
        if np.count_nonzero(flags):
            known = self.node_forbidden[node]
            self.node_forbidden[node] = flags if known is None else known | flags

    def term(self, start: int, end: int, amount: IntArray) -> list[UsageTerm]:
        """One usage term of device memory, or none where it would use nothing."""
        if start >= end or not np.count_nonzero(amount):
            return []
        return [UsageTerm(MEMORY, start, end, self.tables.one_of(amount))]

    # -------------------------------------------------------------- families

    def add_resident_nodes(self) -> None:
        """Add bytes of inputs, parameters and optimizer states at all times, and the updates."""
        for i, node in enumerate(self.model.nodes):
            self.node_usage[i] += self.term(0, self.timeline.horizon, node.resident_bytes)
            if node.update_bytes is not None and node.update_cost is not None:
                time = self.timeline.last_time(self.timeline.update[i])
                self.cost[i] = self.cost[i] + update_price(self.model, i)
                self.node_usage[i] += self.term(time, time + 1, node.update_bytes)

    def add_operators(self) -> None:
        """Add the outputs of every operator from its computation to its last use, and its workspace."""
        for i, node in enumerate(self.model.nodes):
            if node.kind in (NodeKind.FORWARD, NodeKind.BACKWARD):
                start = self.timeline.last_time(self.timeline.compute[i])
                for output in range(node.output_bytes.shape[1]):
                    self.add_life(i, start, self.own_life(i, output), node.output_bytes[:, output])
                if node.workspace_bytes is not None:
                    self.node_usage[i] += self.term(start, start + 1, node.workspace_bytes)

    def add_life(self, node: int, start: int, last: LastUse | None, amount: IntArray) -> None:
        """Hold ``amount`` per strategy of ``node`` from ``start`` to its last use, at least while it is made."""
        if last is None:
            self.node_usage[node] += self.term(start, start + 1, amount)
            return
        end = max(last.end, start + 1)
        self.node_usage[node] += self.term(start, end, amount)
        if last.aliases is not None and end < last.computed_end:
            held = self.read_directly(amount, last.aliases, node, last.reader)
            self.pair_usage((node, last.reader), self.term(end, last.computed_end, held))

    def read_directly(self, amount: IntArray, aliases: BoolArray, node: int, reader: int) -> IntArray:
        """Amounts per strategy of ``node`` under the layouts where its reader reads the storage itself."""
        amount, aliases = self.tables.one_of(amount), self.tables.one_of(aliases)
        sizes = self.modes(node), self.modes(reader)

        def make() -> IntArray:
            return amount[:, None] * self.over_modes(aliases, node, reader)

        return self.tables.made_of((amount, aliases), (*sizes, "read directly"), make)

    def modes(self, node: int) -> int:
        """Number of further decisions per layout of a node; here there are none."""
        return 1

    def over_modes(self, table: BoolArray, producer: int, consumer: int) -> BoolArray:
        """Repeat a table of layouts over further decisions of its nodes; here there are none."""
        return table

    def add_edges(self) -> None:
        """Add resharding cost and copies of every argument."""
        for edge in self.model.edges:
            event = self.timeline.compute[edge.consumer]
            usage = self.copy_terms(event, edge.slot, edge.copy_bytes, edge.peak_bytes)
            cost = weighted(edge.cost, edge.link_cost, argument_weights(self.model, edge, (edge.consumer,)))
            self.factor((edge.producer, edge.consumer), cost, edge.forbidden, usage)

    def copy_terms(self, event: int, slot: int, copy_bytes: IntArray, peak_bytes: IntArray) -> list[UsageTerm]:
        """Usage of an argument's copy: more while it is made, then its bytes until the operator has computed."""
        made = self.timeline.argument_time(event, slot)
        return [
            *self.term(made, made + 1, peak_bytes),
            *self.term(made + 1, self.timeline.last_time(event) + 1, copy_bytes),
        ]

    def add_results(self) -> None:
        """Add results: brought to their layout where they are produced, they stay until the end of the step."""
        for k, result in enumerate(self.model.results):
            node = result.producer
            time = self.timeline.last_time(self.timeline.result[k])
            self.cost[node] = self.cost[node] + result_price(self.model, result)
            self.forbid(node, result.forbidden)
            own = np.where(result.copy_bytes > 0, 0, self.model.nodes[node].output_bytes[:, result.output])
            alone_from = max(time + 1, self.read_until(node, result.output))
            self.node_usage[node] += [
                *self.term(time, time + 1, result.peak_bytes),
                *self.term(time + 1, self.timeline.horizon, result.copy_bytes),
                *self.term(alone_from, self.timeline.horizon, own),
            ]
            copied = self.copied_by_last_reader(node, result.output)
            if copied is not None:
                held = np.tile(own, self.modes(node))[:, None] * self.over_modes(copied.tables, node, copied.reader)
                self.pair_usage((node, copied.reader), self.term(copied.start, copied.end, held))

    def add_gradients(self) -> None:
        """Add the reduction of every gradient and the bytes it holds until its parameter's update.

        A gradient that needs no copy is the producer's own storage, which is counted once: until its last
        reader, then until the last update that reads it.
        """
        by_storage: dict[tuple[int, int], list[int]] = {}
        for k, gradient in enumerate(self.model.gradients):
            time = self.timeline.last_time(self.timeline.gradient[k])
            usage = [
                *self.term(time, time + 1, gradient.peak_bytes),
                *self.term(time + 1, self._updated(gradient) + 1, gradient.copy_bytes),
            ]
            cost = gradient_price(self.model, gradient)
            self.factor((gradient.producer, gradient.parameter), cost, gradient.forbidden, usage)
            by_storage.setdefault((gradient.producer, gradient.output), []).append(k)
        for (producer, output), members in by_storage.items():
            sharing = sorted((self.model.gradients[k] for k in members), key=self._updated, reverse=True)
            alone_from = max(
                self.read_until(producer, output),
                *(self.timeline.last_time(self.timeline.gradient[k]) + 1 for k in members),
            )
            self._add_shared_storage(sharing, alone_from)

    def _updated(self, gradient: GradientEdge) -> int:
        """Time of the update that reads a gradient."""
        return self.timeline.last_time(self.timeline.update[gradient.parameter])

    def _add_shared_storage(self, sharing: list[GradientEdge], start: int) -> None:
        """Hold a producer's storage for the gradients that are it; the first is updated last.

        A further gradient adds bytes only where the first one has a copy of its own. Three and more gradients
        of one storage with different layouts are counted too high.
        """
        longest = sharing[0]
        own = self.model.nodes[longest.producer].output_bytes[:, longest.output]
        aliases = longest.copy_bytes == 0
        pair = longest.producer, longest.parameter
        self.pair_usage(pair, self.term(start, self._updated(longest) + 1, own[:, None] * aliases))
        copied = self.copied_by_last_reader(longest.producer, longest.output)
        if copied is not None:
            held = own[:, None, None] * (copied.tables[:, :, None] & aliases[:, None, :])
            scope = (longest.producer, copied.reader, longest.parameter)
            usage = self.term(copied.start, copied.end, held)
            if usage:
                self.factor(scope, np.zeros(held.shape, dtype=np.int64), usage=usage)
        for gradient in sharing[1:]:
            alone = ~aliases[:, :, None] & (gradient.copy_bytes == 0)[:, None, :]
            usage = self.term(start, self._updated(gradient) + 1, own[:, None, None] * alone)
            if usage:
                scope = (*pair, gradient.parameter)
                self.factor(scope, np.zeros(alone.shape, dtype=np.int64), usage=usage)

    def own_life(self, node: int, output: int) -> LastUse | None:
        """Last use of an output; what may live on as a gradient or result is counted through the computation."""
        last = self.lifetimes.get((node, output), UNREAD).last
        if last is not None and (node, output) in self.lives_on:
            return LastUse(last.computed_end, last.computed_end)
        return last

    def read_until(self, node: int, output: int) -> int:
        """Time up to which an output is counted as read, from whenever it is made."""
        last = self.lifetimes.get((node, output), UNREAD).last
        return 0 if last is None else last.computed_end

    def copied_by_last_reader(self, node: int, output: int) -> CopiedByLastReader | None:
        """While an output's last reader computes on a copy; None where that is counted in any case, or never."""
        last = self.lifetimes.get((node, output), UNREAD).last
        if self.counting is not Counting.EXACT or (node, output) in self.lives_on:
            return None
        if last is None or last.aliases is None or last.end == last.computed_end:
            return None
        return CopiedByLastReader(last.reader, last.end, last.computed_end, ~last.aliases)

    # --------------------------------------------------------------- problem

    def _problem(self, name: str) -> StrategyProblem:
        nodes = tuple(
            Node(name, cost, forbidden, tuple(usage))
            for name, cost, forbidden, usage in zip(
                self.names, self.cost, self.node_forbidden, self.node_usage, strict=True
            )
        )
        factors = tuple(
            Factor(scope, self.tables.one_of(cost), self._forbidden(scope), tuple(self._factor_usage[scope]))
            for scope, cost in self._factor_cost.items()
        )
        return StrategyProblem(
            name=name,
            nodes=nodes,
            factors=factors,
            resources=self.resources(),
            horizon=self.timeline.horizon,
            seconds_per_cost=self.model.seconds_per_cost,
            time_names=self._time_names(),
        )

    def resources(self) -> tuple[Resource, ...]:
        """Device memory, and whatever else a model limits."""
        return (Resource("device memory (bytes)", None),)

    def _forbidden(self, scope: tuple[int, ...]) -> BoolArray | None:
        flags = self._factor_forbidden.get(scope)
        return None if flags is None else self.tables.one_of(flags)

    def _time_names(self) -> tuple[str, ...]:
        names: list[str] = []
        for position, event in enumerate(self.timeline.events):
            if event.kind is EventKind.GRADIENT:
                subject = self.model.nodes[self.model.gradients[event.index].parameter].name
            elif event.kind is EventKind.RESULT:
                subject = self.model.nodes[self.model.results[event.index].producer].name
            else:
                subject = self.model.nodes[event.index].name
            names += [f"{event.kind} of {subject}"] * (
                self.timeline.start[position + 1] - self.timeline.start[position]
            )
        return tuple(names)
