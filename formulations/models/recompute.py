"""Sharding and recomputation as one canonical problem; KIWI's models are cases of it.

A node's strategy is layout x mode: mode 0 keeps the outputs until their last use, every further mode frees
them after forward and runs the operator again, right before one backward operator, its *moment*. A model says
which moments there are and whether a recomputed operator's inputs may be recomputed too.

===================================  ====================================================
cost of reruns                       :meth:`RecomputeProblemBuilder.__init__`, ``add_edges``
outputs, kept or in two lives,       :meth:`RecomputeProblemBuilder.add_operators`
  and workspaces
resharding, paid again by a rerun    :meth:`RecomputeProblemBuilder.add_edges`
inputs that exist when a rerun       :meth:`RecomputeProblemBuilder.add_edges`
  needs them
inputs held for later reruns         :mod:`formulations.models.holds`
===================================  ====================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from formulations.models.counting import Counting
from formulations.models.holds import add_holds
from formulations.models.liveness import LastUse
from formulations.models.sharding import UNREAD, StepProblemBuilder
from formulations.models.step import NodeKind, StepModel
from formulations.models.timeline import build_timeline
from formulations.problem import BoolArray, IntArray, StrategyProblem


class RecomputeProblemBuilder(StepProblemBuilder):
    """Collects the problem of a step whose operators may run again.

    Parameters
    ----------
    model
        The step's tables.
    reruns
        Moments of every forward operator that may run again: the backward operators before which it may.
    counting
        See :class:`Counting`.
    chains
        Whether the inputs of a recomputed operator may be recomputed (KIWI's rule 1 forbids it).
    """

    def __init__(
        self, model: StepModel, reruns: Mapping[int, tuple[int, ...]], counting: Counting, *, chains: bool
    ) -> None:
        super().__init__(model, build_timeline(model, reruns), counting)
        self.reruns = reruns
        self.chains = chains
        self._shared: dict[tuple[object, ...], tuple[IntArray, IntArray]] = {}
        for i, cost in enumerate(self.cost):
            again = [2 * cost] * len(reruns.get(i, ()))
            self.cost[i] = np.concatenate([cost, *again, *[cost] * self.further_modes(i)])

    def build(self, name: str, memory_limit: int | None) -> StrategyProblem:
        """Add the families of sharding and the holds."""
        add_holds(self)
        return super().build(name, memory_limit)

    # ---------------------------------------------------------------- tables

    def modes(self, node: int) -> int:
        """Number of modes of a node."""
        return 1 + len(self.reruns.get(node, ())) + self.further_modes(node)

    def further_modes(self, node: int) -> int:
        """Number of modes beyond keeping and running again, which come last; here there are none."""
        return 0

    def further_lives(self, u: int, output: int) -> list[LastUse | None]:
        """Last direct use of an output in each of the further modes."""
        return []

    def over_modes(self, table: BoolArray, producer: int, consumer: int) -> BoolArray:
        """Repeat a table of layouts over the modes of both nodes."""
        return np.tile(table, (self.modes(producer), self.modes(consumer)))

    def in_mode(self, node: int, mode: int, amount: IntArray) -> IntArray:
        """Amounts of one mode of a node; the others use nothing."""
        found = np.zeros((self.modes(node), amount.shape[0]), dtype=np.int64)
        found[mode] = amount
        return found.ravel()

    def _share(self, key: tuple[object, ...], source: IntArray, make: Callable[[], IntArray]) -> IntArray:
        """Make a table once per key; the source is kept beside it so that its id cannot be used again."""
        full = (id(source), *key)
        if full not in self._shared:
            self._shared[full] = (source, make())
        return self._shared[full][1]

    def _everywhere(self, table: IntArray, producer: int, consumer: int, paid: bool) -> IntArray:
        """A table over the modes of both nodes; ``paid`` again where the consumer runs again."""
        rows, columns = self.modes(producer), self.modes(consumer)
        if rows == columns == 1:
            return table
        size = table.shape[1]
        again = len(self.reruns.get(consumer, ())) if paid else 0

        def make() -> IntArray:
            full = np.tile(table, (rows, columns))
            full[:, size : (1 + again) * size] *= 2
            return full

        return self._share((rows, columns, again), table, make)

    def _in_mode_of_consumer(self, table: IntArray, producer: int, consumer: int, mode: int) -> IntArray:
        """A table over the modes of both nodes, zero but in one mode of the consumer."""
        rows, columns = self.modes(producer), self.modes(consumer)

        def make() -> IntArray:
            full = np.zeros((rows * table.shape[0], columns, table.shape[1]), dtype=np.int64)
            full[:, mode] = np.tile(table, (rows, 1))
            return full.reshape(rows * table.shape[0], columns * table.shape[1])

        return self._share((rows, columns, "mode", mode), table, make)

    # -------------------------------------------------------------- families

    def add_operators(self) -> None:
        """Add outputs: kept ones to their last use; others to their last forward use, and again from the rerun."""
        for i, node in enumerate(self.model.nodes):
            if node.kind not in (NodeKind.FORWARD, NodeKind.BACKWARD):
                continue
            start = self.timeline.last_time(self.timeline.compute[i])
            for output in range(node.output_bytes.shape[1]):
                amount = node.output_bytes[:, output]
                self.add_life(i, start, self.own_life(i, output), self.in_mode(i, 0, amount))
                if i in self.reruns:
                    self._add_two_lives(i, start, output, amount)
            if node.workspace_bytes is not None:
                self._add_workspace(i, start, node.workspace_bytes)

    def _add_workspace(self, i: int, start: int, amount: IntArray) -> None:
        """Add what every execution of an operator holds beside its arguments and outputs."""
        self.node_usage[i] += self.term(start, start + 1, np.tile(amount, self.modes(i)))
        for mode, moment in enumerate(self.reruns.get(i, ()), start=1):
            again = self.timeline.last_time(self.timeline.recompute[i][moment])
            self.node_usage[i] += self.term(again, again + 1, self.in_mode(i, mode, amount))

    def _add_two_lives(self, i: int, start: int, output: int, amount: IntArray) -> None:
        """Add an output that is freed after forward and made again."""
        life = self.lifetimes.get((i, output), UNREAD)
        size = amount.shape[0]
        dropped = np.tile(amount, self.modes(i))
        dropped[:size] = 0
        dropped[(1 + len(self.reruns[i])) * size :] = 0
        self.add_life(i, start, life.forward, dropped)
        for mode, moment in enumerate(self.reruns[i], start=1):
            made = self.timeline.last_time(self.timeline.recompute[i][moment])
            self.add_life(i, made, self.second_life(i, output), self.in_mode(i, mode, amount))

    def second_life(self, node: int, output: int) -> LastUse | None:
        """Last direct use of an output that was made again."""
        last = self.lifetimes.get((node, output), UNREAD).backward
        if last is not None and self.chains and (node, output) in self.lives_on:
            return LastUse(last.computed_end, last.computed_end)
        return last

    def add_edges(self) -> None:
        """Add resharding, paid and held again where the consumer runs again, and the order of reruns."""
        for edge in self.model.edges:
            u, v = edge.producer, edge.consumer
            copy_bytes, peak_bytes = (
                self._everywhere(table, u, v, paid=False) for table in (edge.copy_bytes, edge.peak_bytes)
            )
            usage = self.copy_terms(self.timeline.compute[v], edge.slot, copy_bytes, peak_bytes)
            for mode, moment in enumerate(self.reruns.get(v, ()), start=1):
                again = (self._in_mode_of_consumer(table, u, v, mode) for table in (edge.copy_bytes, edge.peak_bytes))
                usage += self.copy_terms(self.timeline.recompute[v][moment], edge.slot, *again)
            cost = self._everywhere(edge.cost, u, v, paid=True)
            forbidden = self.over_modes(edge.forbidden, u, v)
            if v in self.reruns and self.modes(u) > 1:
                forbidden |= self.out_of_order(u, v)
            self.factor((u, v), cost, forbidden, usage)

    def out_of_order(self, u: int, v: int) -> BoolArray:
        """Pairs of reruns where the input ``u`` would be made after ``v`` needs it, or may not be made again."""
        late = np.zeros((self.modes(u), self.modes(v)), dtype=np.bool_)
        for a, first in enumerate(self.reruns.get(u, ()), start=1):
            for b, then in enumerate(self.reruns[v], start=1):
                late[a, b] = not self.chains or first > then
        sizes = self.model.nodes[u].size, self.model.nodes[v].size
        return np.repeat(np.repeat(late, sizes[0], axis=0), sizes[1], axis=1)

    def new_node(self, name: str, size: int) -> int:
        """Add a further decision that costs nothing by itself."""
        self.names.append(name)
        self.cost.append(np.zeros(size, dtype=np.int64))
        self.node_forbidden.append(None)
        self.node_usage.append([])
        return len(self.cost) - 1
