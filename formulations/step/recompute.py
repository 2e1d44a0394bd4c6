"""Sharding and recomputation as one canonical problem; KIWI's models are cases of it.

A node's strategy is layout x mode: mode 0 keeps the outputs until their last use, every further mode runs the
operator again, right before one or two backward operators, its *moments*. Every execution makes a *copy* of the
outputs, which is held until the last reader before the next one. A model defines the modes and whether a recomputed
operator's inputs may be recomputed too.

Of an operator with modes of two moments, reruns may read any copy. Of the others they read the last copy alone: it
is there before they need it. So the tables stay small and no order has to be counted.

===================================  ====================================================
cost of reruns                       :meth:`RecomputeProblemBuilder.__init__`, ``add_edges``
copies of outputs, and workspaces    :meth:`RecomputeProblemBuilder.add_operators`
resharding, paid again by a rerun    :meth:`RecomputeProblemBuilder.add_edges`
inputs that exist when a rerun       :meth:`RecomputeProblemBuilder.add_edges`
  needs them
inputs held for later reruns         :mod:`formulations.step.holds`
===================================  ====================================================
"""

from __future__ import annotations

import numpy as np

from formulations.problem.strategy_problem import BoolArray, IntArray, StrategyProblem, UsageTerm
from formulations.step.counting import Counting
from formulations.step.holds import add_holds
from formulations.step.liveness import LastUse
from formulations.step.modes import Modes
from formulations.step.sharding import UNREAD, StepProblemBuilder
from formulations.step.timeline import build_timeline
from formulations.step.training_step import NodeKind, StepEdge, StepModel
from formulations.step.weights import argument_weights, execution_price, weighted


class RecomputeProblemBuilder(StepProblemBuilder):
    """Collects the problem of a step whose operators may run again.

    Parameters
    ----------
    model
        The step's tables.
    reruns
        Modes of every forward operator that may run again. Where one has two moments, at most one operator that may
        run again reads each of its outputs.
    counting
        See :class:`Counting`.
    chains
        Whether the inputs of a recomputed operator may be recomputed (KIWI's rule 1 forbids it).

    Attributes
    ----------
    executions
        Per node the moments at which it runs, per mode: first at itself.
    """

    def __init__(self, model: StepModel, reruns: Modes, counting: Counting, *, chains: bool) -> None:
        self.moments = {i: sorted({moment for mode in modes for moment in mode}) for i, modes in reruns.items()}
        super().__init__(model, build_timeline(model, self.moments), counting)
        self.reruns = reruns
        self.rereads = frozenset(i for i, modes in reruns.items() if max(map(len, modes)) > 1)
        self.chains = chains
        self.executions = [
            ((i,), *((i, *mode) for mode in reruns.get(i, ())), *((i,),) * self.further_modes(i))
            for i in range(len(model.nodes))
        ]
        self._modes_with = {
            (i, moment): tuple(k for k, mode in enumerate(modes, start=1) if moment in mode)
            for i, modes in reruns.items()
            for moment in self.moments[i]
        }
        self._first_moments = {i: np.array([mode[0] for mode in modes]) for i, modes in reruns.items()}
        self._last_moments = {i: np.array([mode[-1] for mode in modes]) for i, modes in reruns.items()}
        for i, times in enumerate(self.executions):
            if len(times) > 1:
                # A node that runs again is no parameter: its cost so far is that of one execution.
                self.cost[i] = np.concatenate([execution_price(model, i, moments) for moments in times])

    def build(self, name: str) -> StrategyProblem:
        """Add the families of sharding and the holds."""
        add_holds(self)
        return super().build(name)

    # ---------------------------------------------------------------- tables

    def modes(self, node: int) -> int:
        """Number of modes of a node."""
        return len(self.executions[node])

    def further_modes(self, node: int) -> int:
        """Number of modes beyond keeping and running again, which come last; here there are none."""
        return 0

    def further_lives(self, u: int, output: int) -> list[LastUse | None]:
        """Last direct use of an output in each of the further modes."""
        return []

    def modes_with(self, node: int, moment: int) -> tuple[int, ...]:
        """Modes in which a node runs again at a moment."""
        return self._modes_with[node, moment]

    def over_modes(self, table: BoolArray, producer: int, consumer: int) -> BoolArray:
        """Repeat a table of layouts over the modes of both nodes; it is shared, so it must not be changed."""
        rows, columns = self.modes(producer), self.modes(consumer)
        if rows == columns == 1:
            return table
        table = self.tables.one_of(table)
        return self.tables.made_of((table,), (rows, columns), lambda: np.tile(table, (rows, columns)))

    def in_mode(self, node: int, mode: int, amount: IntArray) -> IntArray:
        """Amounts of one mode of a node; the others use nothing."""
        return self.in_modes(node, (mode,), amount)

    def in_modes(self, node: int, modes: tuple[int, ...], amount: IntArray) -> IntArray:
        """Amounts of some modes of a node, the others use nothing; shared, so it must not be changed."""
        count = self.modes(node)
        amount = self.tables.one_of(amount)

        def make() -> IntArray:
            found = np.zeros((count, amount.shape[0]), dtype=np.int64)
            found[list(modes)] = amount
            return found.ravel()

        return self.tables.made_of((amount,), ("in modes", count, *modes), make)

    def _everywhere(self, table: IntArray, producer: int, consumer: int) -> IntArray:
        """A table over the modes of both nodes."""
        rows, columns = self.modes(producer), self.modes(consumer)
        if rows == columns == 1:
            return table
        return self.tables.made_of((table,), ("everywhere", rows, columns), lambda: np.tile(table, (rows, columns)))

    def _paid(self, edge: StepEdge) -> IntArray:
        """Cost of an argument over the modes of both nodes, paid again where its reader runs again."""
        rows = self.modes(edge.producer)
        weights = tuple(argument_weights(self.model, edge, moments) for moments in self.executions[edge.consumer])
        if rows == 1 and weights == ((1,),):
            return edge.cost

        def make() -> IntArray:
            columns = [weighted(edge.cost, edge.link_cost, of_mode) for of_mode in weights]
            return np.tile(np.concatenate(columns, axis=1), (rows, 1))

        tables = (edge.cost,) if edge.link_cost is None else (edge.cost, edge.link_cost)
        return self.tables.made_of(tables, ("paid", rows, weights), make)

    def _at_moment(self, table: IntArray, producer: int, consumer: int, moment: int) -> IntArray:
        """A table over the modes of both nodes, zero where the consumer does not run again at the moment."""
        rows, columns = self.modes(producer), self.modes(consumer)
        there = self.modes_with(consumer, moment)

        def make() -> IntArray:
            full = np.zeros((rows * table.shape[0], columns, table.shape[1]), dtype=np.int64)
            full[:, there] = np.tile(table, (rows, 1))[:, None]
            return full.reshape(rows * table.shape[0], columns * table.shape[1])

        return self.tables.made_of((table,), ("at a moment", rows, columns, *there), make)

    # -------------------------------------------------------------- families

    def add_operators(self) -> None:
        """Add copies of outputs: a kept one to its last use; others to the last forward use, and from reruns on."""
        for i, node in enumerate(self.model.nodes):
            if node.kind not in (NodeKind.FORWARD, NodeKind.BACKWARD):
                continue
            start = self.timeline.last_time(self.timeline.compute[i])
            for output in range(node.output_bytes.shape[1]):
                amount = self.tables.one_of(node.output_bytes[:, output])
                self.add_life(i, start, self.own_life(i, output), self.in_mode(i, 0, amount))
                if i in self.reruns:
                    self._add_copies(i, start, output, amount)
            if node.workspace_bytes is not None:
                self._add_workspace(i, start, node.workspace_bytes)

    def _add_workspace(self, i: int, start: int, amount: IntArray) -> None:
        """Add the workspace of every execution of an operator."""
        self.node_usage[i] += self.term(start, start + 1, np.tile(amount, self.modes(i)))
        for moment in self.moments.get(i, ()):
            again = self.timeline.last_time(self.timeline.recompute[i][moment])
            there = self.modes_with(i, moment)
            self.node_usage[i] += self.term(again, again + 1, self.in_modes(i, there, amount))

    def _add_copies(self, i: int, start: int, output: int, amount: IntArray) -> None:
        """Add an output that is made again: its first copy and those of the reruns, without their holds."""
        reruns = self.reruns[i]
        self.add_life(i, start, self.first_life(i, output), self.in_modes(i, tuple(range(1, 1 + len(reruns))), amount))
        last_life = self.last_life(i, output)
        for moment in self.moments[i]:
            made = self.timeline.last_time(self.timeline.recompute[i][moment])
            there = self.modes_with(i, moment)
            last = tuple(mode for mode in there if reruns[mode - 1][-1] == moment)
            self.add_life(i, made, last_life, self.in_modes(i, last, amount))
            if len(last) < len(there):
                earlier = tuple(mode for mode in there if mode not in last)
                self.add_life(i, made, None, self.in_modes(i, earlier, amount))

    def first_life(self, node: int, output: int) -> LastUse | None:
        """Last direct use of the first copy of an output that is made again."""
        last = self.lifetimes.get((node, output), UNREAD).forward
        return self._computed(node, output, last) if node in self.rereads else last

    def last_life(self, node: int, output: int) -> LastUse | None:
        """Last direct use of the last copy of an output that is made again."""
        last = self.lifetimes.get((node, output), UNREAD).backward
        return self._computed(node, output, last) if self.chains else last

    def _computed(self, node: int, output: int, last: LastUse | None) -> LastUse | None:
        """The same use, through its computation where the output is counted as held for later."""
        if last is not None and (node, output) in self.lives_on:
            return LastUse(last.computed_end, last.computed_end)
        return last

    def add_edges(self) -> None:
        """Add resharding, paid and held again where the consumer runs again, and the order of reruns."""
        for edge in self.model.edges:
            u, v = edge.producer, edge.consumer
            forbidden = self.over_modes(edge.forbidden, u, v) if np.count_nonzero(edge.forbidden) else None
            if v in self.reruns and self.modes(u) > 1:
                late = self.out_of_order(u, v)
                forbidden = late if forbidden is None else forbidden | late
            self.factor((u, v), self._paid(edge), forbidden, self._argument_copies(edge))

    def _argument_copies(self, edge: StepEdge) -> list[UsageTerm]:
        """Usage of an argument's copy in every execution of its reader."""
        if not (np.count_nonzero(edge.copy_bytes) or np.count_nonzero(edge.peak_bytes)):
            return []
        u, v = edge.producer, edge.consumer
        tables = edge.copy_bytes, edge.peak_bytes
        first = (self._everywhere(table, u, v) for table in tables)
        usage = self.copy_terms(self.timeline.compute[v], edge.slot, *first)
        for moment in self.moments.get(v, ()):
            again = (self._at_moment(table, u, v, moment) for table in tables)
            usage += self.copy_terms(self.timeline.recompute[v][moment], edge.slot, *again)
        return usage

    def out_of_order(self, u: int, v: int) -> BoolArray:
        """Pairs of modes where ``u`` would be made again after ``v`` needs its last copy, or may not be made again."""
        late = np.zeros((self.modes(u), self.modes(v)), dtype=np.bool_)
        if u in self.reruns:
            again = late[1 : 1 + len(self.reruns[u]), 1 : 1 + len(self.reruns[v])]
            if not self.chains:
                again[:] = True
            elif u not in self.rereads:
                again[:] = self._last_moments[u][:, None] > self._first_moments[v][None, :]
        sizes = self.model.nodes[u].size, self.model.nodes[v].size
        return np.repeat(np.repeat(late, sizes[0], axis=0), sizes[1], axis=1)

    def new_node(self, name: str, size: int) -> int:
        """Add a further decision that costs nothing by itself."""
        self.names.append(name)
        self.cost.append(np.zeros(size, dtype=np.int64))
        self.node_forbidden.append(None)
        self.node_usage.append([])
        return len(self.cost) - 1
