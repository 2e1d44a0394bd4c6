"""KIWI with reduced complexity: sharding and keep-or-recompute, jointly, with direct liveness.

The paper's reduced problem (equations 2-11) chooses for every operator a layout and for every forward
operator that backward needs (``z_i = 1``) whether it is kept (``m_i = 1``) or recomputed. Its three
rules: (1) the inputs of a recomputed operator are not recomputed; (2) a recomputed value stays until its
last use; (3) a value that is not kept is freed after its last forward use.

Here it is a canonical problem, with a node's strategy = layout x {keep, recompute}:

- objective (2): a recomputed operator and the resharding of its inputs are paid twice;
- rule 1 (9): (producer recomputed, consumer recomputed) is forbidden, where the producer has z = 1;
- recomputation happens at ``H_i``, right before the first backward consumer (5);
- memory (3)-(8): intervals of bytes, per output instead of per operator;
- (10)-(11): a kept input of a recomputed operator is held until that recomputation has computed. With one such
  consumer this is usage on the pair; with several it is a maximum, so a *hold node* ``h`` chooses until
  when the value is held: usage on the pair (producer, h), and (h, consumer recomputed later) forbidden.

Repairs of open points: (9) applies only where z_j = 1, the maximum of (10) ranges over recomputed
children only, and (8) and (16) are both <=.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from formulations.models.sharding import UNREAD, StepProblemBuilder
from formulations.models.step import NodeKind, StepModel
from formulations.problem import BoolArray, IntArray, StrategyProblem


@dataclass(frozen=True, slots=True)
class StepDecision:
    """A solution of a step model: a layout per node and the operators that are recomputed."""

    layouts: tuple[int, ...]
    recomputed: frozenset[int]


def build_kiwi_reduced(model: StepModel, memory_limit: int | None) -> StrategyProblem:
    """Build the joint problem of sharding and recomputation.

    Parameters
    ----------
    model
        The step's tables.
    memory_limit
        Bytes on one device, or None.

    Returns
    -------
    StrategyProblem
        Its first nodes are the model's nodes; strategy ``mode * S + layout`` with mode 0 keep, 1
        recompute (only where the model allows it). Hold nodes follow.
    """
    return KiwiReducedBuilder(model).build("kiwi_reduced", memory_limit)


def decode(model: StepModel, choices: tuple[int, ...]) -> StepDecision:
    """Read layouts and recomputed operators from a solution of any problem built from ``model``."""
    layouts: list[int] = []
    recomputed: set[int] = set()
    for i, node in enumerate(model.nodes):
        mode, layout = divmod(choices[i], node.size)
        layouts.append(layout)
        if mode:
            recomputed.add(i)
    return StepDecision(tuple(layouts), frozenset(recomputed))


class KiwiReducedBuilder(StepProblemBuilder):
    """The sharding problem with every recomputable operator's strategies doubled."""

    def __init__(self, model: StepModel) -> None:
        super().__init__(model)
        self.candidate = model.recompute_candidates
        self._expanded: dict[tuple[int, int, int], tuple[IntArray, IntArray]] = {}
        for i in np.flatnonzero(self.candidate):
            self.cost[i] = np.concatenate([self.cost[i], 2 * self.cost[i]])

    def modes(self, node: int) -> int:
        """Two for an operator that may be recomputed, else one."""
        return 2 if self.candidate[node] else 1

    def expand(self, table: IntArray, producer: int, consumer: int) -> IntArray:
        """Repeat a table of layouts over the modes of both nodes; equal requests share one array."""
        key = (id(table), self.modes(producer), self.modes(consumer))
        if key not in self._expanded:
            # The source table is kept beside its copy so that its id cannot be reused.
            self._expanded[key] = (table, np.tile(table, key[1:]) if key[1:] != (1, 1) else table)
        return self._expanded[key][1]

    def at_recompute(self, table: IntArray, producer: int, consumer: int) -> IntArray:
        """Repeat a table over the modes and keep it only where the consumer is recomputed."""
        full = np.tile(table, (self.modes(producer), 2))
        full[:, : table.shape[1]] = 0
        return full

    def build(self, name: str, memory_limit: int | None) -> StrategyProblem:
        """Add the families of sharding and the holds."""
        self.add_holds()
        return super().build(name, memory_limit)

    def over_modes(self, table: BoolArray, producer: int, consumer: int) -> BoolArray:
        """Repeat a table of layouts over the modes of both nodes."""
        return np.tile(table, (self.modes(producer), self.modes(consumer)))

    def add_operators(self) -> None:
        """Add outputs: kept ones to their last use; recomputed ones in two intervals (rules 2 and 3)."""
        for i, node in enumerate(self.model.nodes):
            if node.kind not in (NodeKind.FORWARD, NodeKind.BACKWARD):
                continue
            start = self.timeline.last_time(self.timeline.compute[i])
            for output in range(node.output_bytes.shape[1]):
                amount = node.output_bytes[:, output]
                life = self.lifetimes.get((i, output), UNREAD)
                if not self.candidate[i]:
                    self.add_life(i, start, self.own_life(i, output), amount)
                    continue
                rerun = self.timeline.last_time(self.timeline.recompute[i])
                nothing = np.zeros_like(amount)
                kept, dropped = np.concatenate([amount, nothing]), np.concatenate([nothing, amount])
                self.add_life(i, start, self.own_life(i, output), kept)
                self.add_life(i, start, life.forward, dropped)
                self.add_life(i, rerun, life.backward, dropped)

    def add_edges(self) -> None:
        """Add resharding, paid and held again where the consumer is recomputed, and rule 1."""
        for edge in self.model.edges:
            u, v = edge.producer, edge.consumer
            cost, copy_bytes, peak_bytes = (
                self.expand(table, u, v) for table in (edge.cost, edge.copy_bytes, edge.peak_bytes)
            )
            forbidden = self.over_modes(edge.forbidden, u, v)
            usage = self.copy_terms(self.timeline.compute[v], edge.slot, copy_bytes, peak_bytes)
            if self.candidate[v]:
                cost = cost + self.at_recompute(edge.cost, u, v)
                copy_again, peak_again = (
                    self.at_recompute(table, u, v) for table in (edge.copy_bytes, edge.peak_bytes)
                )
                usage += self.copy_terms(self.timeline.recompute[v], edge.slot, copy_again, peak_again)
                if self.candidate[u]:
                    forbidden[edge.cost.shape[0] :, edge.cost.shape[1] :] = True
            self.factor((u, v), cost, forbidden, usage)

    def add_holds(self) -> None:
        """Add how long kept inputs wait for recomputed consumers, equations (10) and (11)."""
        for u, node in enumerate(self.model.nodes):
            if node.kind is not NodeKind.FORWARD:
                continue
            consumers: dict[int, set[int]] = {}
            for edge in self.model.edges_from[u]:
                if self.candidate[edge.consumer]:
                    consumers.setdefault(edge.output, set()).add(edge.consumer)
            for output, readers in sorted(consumers.items()):
                self._add_hold(u, output, sorted(readers))

    def _add_hold(self, u: int, output: int, readers: list[int]) -> None:
        """Hold one output for the recomputed ones among ``readers``, beyond its own last use."""
        last = self.lifetimes[u, output].last
        assert last is not None, "an output with recomputable readers is read"
        own_end = last.computed_end
        ends = {v: self.timeline.last_time(self.timeline.recompute[v]) + 1 for v in readers}
        late = {v: end for v, end in ends.items() if end > own_end}
        if not late:
            return
        self.lives_on.add((u, output))
        amount = self.model.nodes[u].output_bytes[:, output]
        if self.candidate[u]:
            amount = np.concatenate([amount, np.zeros_like(amount)])
        if len(late) == 1:
            ((v, end),) = late.items()
            held = np.zeros((amount.shape[0], self.cost[v].shape[0]), dtype=np.int64)
            held[:, held.shape[1] // 2 :] = amount[:, None]
            self.pair_usage((u, v), self.term(own_end, end, held))
            return
        until = sorted({own_end, *late.values()})
        hold = self._new_node(f"{self.names[u]} held", len(until))
        for state in range(1, len(until)):
            held = np.zeros((amount.shape[0], len(until)), dtype=np.int64)
            held[:, state:] = amount[:, None]
            self.pair_usage((u, hold), self.term(until[state - 1], until[state], held))
        for v, end in late.items():
            too_early = np.zeros((len(until), self.cost[v].shape[0]), dtype=np.bool_)
            too_early[: until.index(end), too_early.shape[1] // 2 :] = True
            self.factor((hold, v), np.zeros(too_early.shape, dtype=np.int64), too_early)

    def _new_node(self, name: str, size: int) -> int:
        self.names.append(name)
        self.cost.append(np.zeros(size, dtype=np.int64))
        self.node_forbidden.append(None)
        self.node_usage.append([])
        return len(self.cost) - 1
