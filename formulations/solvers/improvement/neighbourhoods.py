"""Neighbourhoods of an assignment: which nodes may change at once.

Each kind puts nodes in an order of importance, and as many of them are free as a budget of columns of the linear
model allows.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from formulations.encodings.flat import FlatProblem, FloatArray, Graph
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import IntArray
from formulations.solvers.local_search.tree_moves import HUB_DEGREE

KINDS = ("ball", "regret", "window", "hub")
"""Techniques: the kinds of neighbourhood that are drawn where they make sense."""

_NEVER = 1e300
"""Not tunable: above any cost."""


class Neighbourhoods:
    """Draws neighbourhoods of a flat problem.

    Parameters
    ----------
    flat
        The flat problem.
    slack
        Per strategy, laid out as ``flat.unary``: how far above the bound an assignment with it is at least.
    random
        Draws all that is random.

    Attributes
    ----------
    kinds
        Names of the kinds that make sense for this problem, in a fixed order.
    free
        The nodes of several strategies.
    """

    def __init__(self, flat: FlatProblem, slack: FloatArray, random: np.random.Generator) -> None:
        self.flat = flat
        self.slack = slack
        self._random = random
        graph = flat.graph
        self._degree = np.diff(graph.incident_start)
        self._low, self._high = _extents(flat)
        self.free = np.flatnonzero(graph.sizes > 1).astype(np.int64)
        self._component = components(graph)
        orders: dict[str, Callable[[IntArray], IntArray]] = {"ball": self._ball, "regret": self._regret}
        if (self._high > self._low).any():
            orders["window"] = self._window
        if int(self._degree.max(initial=0)) >= HUB_DEGREE:
            orders["hub"] = self._hub
        self._orders = orders
        self.kinds: tuple[str, ...] = tuple(kind for kind in orders if kind in KINDS)

    def draw(self, kind: str, choices: IntArray, budget: int) -> IntArray:
        """Return the nodes of a neighbourhood of ``choices`` of about ``budget`` columns, the most important first."""
        if not len(self.free):
            return self.free
        order = self._orders[kind](choices)
        # What a search from the seeds does not reach comes last, component by component.
        seen = np.zeros(len(choices), dtype=np.bool_)
        seen[order] = True
        others = self._components()
        order = np.concatenate([order[self.flat.graph.sizes[order] > 1], others[~seen[others]]])
        return order[: prefix_within(self.flat.graph, order, budget)]

    def _ball(self, choices: IntArray) -> IntArray:
        return self._around(self._random.choice(self.free, 1))

    def _regret(self, choices: IntArray) -> IntArray:
        """Balls around nodes whose present strategies are far above the bound."""
        graph = self.flat.graph
        regret = np.minimum(self.slack[graph.offset[:-1] + choices], self.flat.penalty)[self.free]
        # Exponential races: the order of draws without replacement in proportion to the regret.
        race = self._random.exponential(size=len(self.free)) / (regret + 1e-9 * regret.max() + 1e-300)
        seeds = max(1, int(np.exp(self._random.uniform(0, np.log(1 + len(self.free) / 50)))))
        return self._around(self.free[np.argsort(race, kind="stable")[:seeds]])

    def _window(self, choices: IntArray) -> IntArray:
        """Nodes around a row; those that are used only near it first."""
        row = int(self._random.integers(len(self.flat.usage.limit)))
        using = np.flatnonzero((self._high > self._low) & (self.flat.graph.sizes > 1))
        reach = np.maximum(row - self._low[using], self._high[using] - 1 - row)
        return using[np.argsort(reach, kind="stable")].astype(np.int64)

    def _hub(self, choices: IntArray) -> IntArray:
        """A hub and its neighbours, then theirs."""
        hubs = np.flatnonzero(self._degree >= HUB_DEGREE)
        weight = self._degree[hubs] / self._degree[hubs].sum()
        hub = self._random.choice(hubs, 1, p=weight).astype(np.int64)
        return breadth_first(self.flat.graph, hub, self._priority(), len(self._degree))

    def _components(self) -> IntArray:
        """Connected components in random order, as wholes."""
        rank = self._random.random(int(self._component.max()) + 1)
        return self.free[np.argsort(rank[self._component[self.free]], kind="stable")]

    def _around(self, seeds: IntArray) -> IntArray:
        """Breadth first from seeds; hubs are passed through at random, for all is near to all through them."""
        through = max(HUB_DEGREE, int(np.exp(self._random.uniform(1.0, np.log(3 + self._degree.max())))))
        return breadth_first(self.flat.graph, seeds, self._priority(), through)

    def _priority(self) -> IntArray:
        return self._random.permutation(len(self._degree)).astype(np.int64)


def _extents(flat: FlatProblem) -> tuple[IntArray, IntArray]:
    """Return the first row and the one past the last that each node uses; equal where it uses none."""
    usage = flat.usage
    nodes = len(flat.graph.sizes)
    owner = np.repeat(np.arange(nodes), np.diff(usage.node_start))
    low, high = np.full(nodes, len(usage.limit), dtype=np.int64), np.zeros(nodes, dtype=np.int64)
    own = len(owner)
    np.minimum.at(low, owner, usage.low[:own])
    np.maximum.at(high, owner, usage.high[:own])
    return np.minimum(low, high), high


@compiled
def components(graph: Graph) -> IntArray:
    """Return the number of the connected component of every node; nodes of one strategy do not connect."""
    count = len(graph.sizes)
    label = np.full(count, -1, np.int64)
    waiting = np.empty(count, np.int64)
    labels = 0
    for seed in range(count):
        if label[seed] >= 0:
            continue
        label[seed] = labels
        waiting[0] = seed
        size = 1
        while size > 0:
            size -= 1
            i = waiting[size]
            if graph.sizes[i] == 1:
                continue
            for a in range(graph.incident_start[i], graph.incident_start[i + 1]):
                f = graph.incident_factor[a]
                for k in range(graph.arity[f]):
                    j = graph.scope[f, k]
                    if label[j] < 0 and graph.sizes[j] > 1:
                        label[j] = labels
                        waiting[size] = j
                        size += 1
        labels += 1
    return label


@compiled
def breadth_first(graph: Graph, seeds: IntArray, priority: IntArray, through: int) -> IntArray:
    """Return the nodes in the order of a breadth-first search; neighbours of one node by ``priority``.

    The search does not go on from nodes of a degree above ``through`` unless they are seeds.
    """
    count = len(graph.sizes)
    seen = np.zeros(count, np.bool_)
    order = np.empty(count, np.int64)
    size = 0
    for seed in seeds:
        seen[seed] = True
        order[size] = seed
        size += 1
    done = 0
    while done < size:
        i = order[done]
        done += 1
        first, end = graph.incident_start[i], graph.incident_start[i + 1]
        if end - first > through and done > len(seeds):
            continue
        opened = size
        for a in range(first, end):
            f = graph.incident_factor[a]
            for k in range(graph.arity[f]):
                j = graph.scope[f, k]
                if not seen[j]:
                    seen[j] = True
                    order[size] = j
                    size += 1
        rank = np.argsort(priority[order[opened:size]])
        order[opened:size] = order[opened:size][rank]
    return order[:size]


@compiled
def prefix_within(graph: Graph, order: IntArray, budget: int) -> int:
    """Return how many nodes of ``order`` may be free for their linear model to have ``budget`` columns, at least 1."""
    inside = np.zeros(len(graph.sizes), np.bool_)
    columns = 0
    for z in range(len(order)):
        i = order[z]
        inside[i] = True
        columns += graph.sizes[i]
        for a in range(graph.incident_start[i], graph.incident_start[i + 1]):
            f = graph.incident_factor[a]
            entries, others = graph.sizes[i], 0
            for k in range(graph.arity[f]):
                j = graph.scope[f, k]
                if j != i and inside[j]:
                    entries *= graph.sizes[j]
                    others += 1
            if others > 0:
                columns += entries
        if columns > budget:
            return max(1, z)
    return len(order)


@compiled
def strategy_slacks(graph: Graph, unary: FloatArray, tables: FloatArray, messages: FloatArray) -> FloatArray:
    """Return, laid out as ``unary``, how far above the bound of the messages an assignment with a strategy is at least.

    The costs are priced ones. This is the float form of what :mod:`formulations.solvers.prices.fixing` evaluates
    exactly; it guides and proves nothing.
    """
    count = len(graph.sizes)
    slack = unary.copy()
    least = np.empty(len(messages))
    least[:] = _NEVER
    for f in range(len(graph.arity)):
        for e in range(graph.table_size[f]):
            value = tables[graph.table_start[f] + e]
            for k in range(graph.arity[f]):
                s = (e // graph.stride[f, k]) % graph.sizes[graph.scope[f, k]]
                value -= messages[graph.message_start[f, k] + s]
            for k in range(graph.arity[f]):
                place = graph.message_start[f, k] + (e // graph.stride[f, k]) % graph.sizes[graph.scope[f, k]]
                least[place] = min(least[place], value)
    for i in range(count):
        first, size = graph.offset[i], graph.sizes[i]
        for a in range(graph.incident_start[i], graph.incident_start[i + 1]):
            start = graph.message_start[graph.incident_factor[a], graph.incident_axis[a]]
            for s in range(size):
                slack[first + s] += messages[start + s]
        low = slack[first]
        for s in range(size):
            low = min(low, slack[first + s])
        for s in range(size):
            slack[first + s] -= low
        for a in range(graph.incident_start[i], graph.incident_start[i + 1]):
            start = graph.message_start[graph.incident_factor[a], graph.incident_axis[a]]
            low = least[start]
            for s in range(size):
                low = min(low, least[start + s])
            for s in range(size):
                slack[first + s] += least[start + s] - low
    return slack
