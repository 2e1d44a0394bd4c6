"""What KIWI's two published problems share: one-hot strategies, pairs of them per edge, products of binaries."""

from __future__ import annotations

from formulations.encodings.integer_program import ProgramBuilder
from formulations.kiwi.graph import KiwiGraph

Term = tuple[int, int]
"""Column and coefficient."""


class StrategyColumns:
    """Equations (21)-(23): one-hot ``s`` per operator, and ``e`` per edge as the outer product of two of them.

    The marginals of ``e`` are equalities: with <= as printed, the zero vector would make resharding free. The
    columns pay the first computation of every operator.

    Parameters
    ----------
    builder
        Where columns and rows go.
    graph
        The instance.
    """

    def __init__(self, builder: ProgramBuilder, graph: KiwiGraph) -> None:
        self.graph = graph
        self.strategy = [builder.binaries(operator.cost.tolist()) for operator in graph.operators]
        self._paid: list[list[Term]] = [
            list(zip(columns, operator.cost.tolist(), strict=True))
            for columns, operator in zip(self.strategy, graph.operators, strict=True)
        ]
        for edge in graph.edges:
            pairs = [[builder.continuous(0, 1, int(cost)) for cost in row] for row in edge.cost]
            for column, row in zip(self.strategy[edge.producer], pairs, strict=True):
                builder.equal([*((pair, 1) for pair in row), (column, -1)], 0)
            for column, pair_column in zip(self.strategy[edge.consumer], zip(*pairs, strict=True), strict=True):
                builder.equal([*((pair, 1) for pair in pair_column), (column, -1)], 0)
            self._paid[edge.consumer] += [
                (pair, cost)
                for row, costs in zip(pairs, edge.cost.tolist(), strict=True)
                for pair, cost in zip(row, costs, strict=True)
            ]

    def paid(self, operator: int) -> list[Term]:
        """Columns that one execution of an operator pays for, with their costs."""
        return self._paid[operator]

    def amounts(self, operator: int) -> list[Term]:
        """Columns of an operator's strategies with the bytes of its output, in the graph's byte units."""
        amounts = self.graph.operators[operator].output_bytes // self.graph.byte_unit
        return list(zip(self.strategy[operator], amounts.tolist(), strict=True))


def at_least_both(builder: ProgramBuilder, one: int, other: int, cost: int = 0) -> int:
    """Add a column that is at least the product of two binaries, for what costs or occupies."""
    both = builder.continuous(0, 1, cost)
    builder.at_least([(both, 1), (one, -1), (other, -1)], -1)
    return both


def at_most_both(builder: ProgramBuilder, one: int, other: int) -> int:
    """Add a column that is at most the product of two binaries, for what frees."""
    both = builder.continuous(0, 1)
    builder.at_most([(both, 1), (one, -1)], 0)
    builder.at_most([(both, 1), (other, -1)], 0)
    return both
