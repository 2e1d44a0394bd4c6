"""What an operator costs per configuration: its own layout class and those of everything that it reads.

Strategies of an operator that no reader distinguishes (equal bytes, equal resharding to all readers, equal extras) form
one *class*. Given the classes of an operator's producers and its own, the best strategy within its class
is known, so that one table per operator replaces strategies and resharding tables together: one linear
column per entry instead of products, and a tighter relaxation.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np

from formulations.kiwi.graph import GraphError, KiwiGraph

MOST_ENTRIES = 20_000
"""Largest table of one operator."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """One entry of an operator's table.

    Parameters
    ----------
    own
        Class of the operator.
    others
        Class of each neighbour, in the order of :attr:`ConfigurationTable.neighbours`.
    cost
        Cost of one execution with the best strategy, resharding included.
    strategy
        That strategy.
    """

    own: int
    others: tuple[int, ...]
    cost: int
    strategy: int


@dataclass(frozen=True, slots=True)
class ConfigurationTable:
    """All configurations of one operator; ``neighbours`` are its producers, residents included, ascending."""

    neighbours: tuple[int, ...]
    entries: tuple[Configuration, ...]


@dataclass(frozen=True, slots=True)
class Configurations:
    """Classes and tables of a graph.

    Parameters
    ----------
    classes
        Per operator its classes, each a tuple of strategies.
    class_bytes
        Bytes of the output per operator and class.
    tables
        Per operator its table; of residents too, which have no neighbours.
    """

    classes: tuple[tuple[tuple[int, ...], ...], ...]
    class_bytes: tuple[tuple[int, ...], ...]
    tables: tuple[ConfigurationTable, ...]

    def strategies(self, chosen: tuple[int, ...]) -> tuple[int, ...]:
        """Return the best strategies for one class per operator."""
        found = []
        for i, table in enumerate(self.tables):
            others = tuple(chosen[j] for j in table.neighbours)
            found.append(next(e.strategy for e in table.entries if e.own == chosen[i] and e.others == others))
        return tuple(found)


def configurations(graph: KiwiGraph) -> Configurations:
    """Find classes and tables.

    Raises
    ------
    GraphError
        If a table would have more than :data:`MOST_ENTRIES` entries.
    """
    classes = tuple(_classes(graph, i) for i in range(len(graph.operators)))
    class_bytes = tuple(
        tuple(int(operator.output_bytes[members[0]]) for members in of_operator)
        for operator, of_operator in zip(graph.operators, classes, strict=True)
    )
    return Configurations(classes, class_bytes, tuple(_table(graph, classes, i) for i in range(len(graph.operators))))


def _classes(graph: KiwiGraph, operator: int) -> tuple[tuple[int, ...], ...]:
    found: dict[tuple[int | bytes, ...], list[int]] = {}
    for strategy in range(graph.operators[operator].size):
        seen_by_readers = tuple(
            edge.cost[strategy].tobytes() + (b"" if edge.forbidden is None else edge.forbidden[strategy].tobytes())
            for edge in graph.edges_from[operator]
        )
        extras = (amounts for extra in graph.extras for amounts in extra.key(operator, strategy))
        key = (int(graph.operators[operator].output_bytes[strategy]), *seen_by_readers, *extras)
        found.setdefault(key, []).append(strategy)
    return tuple(map(tuple, found.values()))


def _table(graph: KiwiGraph, classes: tuple[tuple[tuple[int, ...], ...], ...], operator: int) -> ConfigurationTable:
    edges = graph.edges_into[operator]
    neighbours = tuple(sorted({edge.producer for edge in edges}))
    size = len(classes[operator])
    for j in neighbours:
        size *= len(classes[j])
    if size > MOST_ENTRIES:
        name = graph.operators[operator].name
        raise GraphError(
            f"operator {operator} ({name}) and its {len(neighbours)} inputs have {size} configurations, more than "
            f"{MOST_ENTRIES}; give them fewer strategies, or use the published form"
        )
    costs = graph.operators[operator].cost
    entries = []
    for others in product(*(range(len(classes[j])) for j in neighbours)):
        strategy_of = {j: classes[j][c][0] for j, c in zip(neighbours, others, strict=True)}
        cost = costs + sum((edge.cost[strategy_of[edge.producer]] for edge in edges), start=0 * costs)
        impossible = {
            strategy
            for edge in edges
            if edge.forbidden is not None
            for strategy in np.flatnonzero(edge.forbidden[strategy_of[edge.producer]]).tolist()
        }
        for own, members in enumerate(classes[operator]):
            possible = [strategy for strategy in members if strategy not in impossible]
            if not possible:
                continue
            best = min(possible, key=lambda strategy: int(cost[strategy]))
            entries.append(Configuration(own, others, int(cost[best]), best))
    return ConfigurationTable(neighbours, tuple(entries))
