"""What KIWI's two published problems share: one-hot strategies, pairs of them per edge, products of binaries."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from formulations.encodings.pyomo_program import add_rows
from formulations.kiwi.extras import Extra
from formulations.kiwi.program import KiwiProgram

Index = tuple[int, ...]


class StrategyProgram(KiwiProgram, ABC):
    r"""One-hot :math:`s_i` per operator and :math:`e_{ji} = s_j^T s_i` per edge, equations (21)-(23).

    A product of two binaries that costs or occupies becomes :math:`w \ge a + b - 1`, one that frees
    :math:`w \le a, w \le b`.
    """

    @cached_property
    def resharding(self) -> dict[tuple[int, int], list[list[int]]]:
        """The tables :math:`R_{ji}` by producer ``j`` and consumer ``i``; parallel edges are added up."""
        found: dict[tuple[int, int], list[list[int]]] = {}
        for edge in self.graph.edges:
            before = np.array(found.get((edge.producer, edge.consumer), 0))
            found[edge.producer, edge.consumer] = (edge.cost + before).tolist()
        return found

    @cached_property
    def forbidden_pairs(self) -> set[Index]:
        """Strategies ``p`` and ``q`` of an edge ``j, i`` that cannot meet, as ``j, i, p, q``."""
        return {
            (edge.producer, edge.consumer, p, q)
            for edge in self.graph.edges
            if edge.forbidden is not None
            for p, q in np.argwhere(edge.forbidden).tolist()
        }

    def add_strategies(self, m: Any) -> None:
        """Add ``V``, ``E``, ``s`` and ``e`` with (21)-(23)."""
        from pyomo.core import Binary, Set, Var

        count = len(self.graph.operators)
        m.V = Set(initialize=range(self.first, count))
        m.E = Set(initialize=list(self.resharding))
        m.s = Var(self.with_strategies((i,) for i in range(count)), domain=Binary)
        forbidden = self.forbidden_pairs
        m.e = Var(
            [(j, i, p, q) for j, i in m.E for p in self.strategies(j) for q in self.strategies(i)],
            bounds=lambda m, *pair: (0, int(pair not in forbidden)),
        )
        add_rows(m, self.one_strategy, range(count))
        add_rows(m, self.consumer_marginal, [(j, i, q) for j, i in m.E for q in self.strategies(i)])
        add_rows(m, self.producer_marginal, [(j, i, p) for j, i in m.E for p in self.strategies(j)])

    def one_strategy(self, m: Any, i: int) -> Any:
        r"""(21): :math:`\sum_p s_{i,p} = 1`."""
        return sum(m.s[i, p] for p in self.strategies(i)) == 1

    def consumer_marginal(self, m: Any, j: int, i: int, q: int) -> Any:
        r"""(22): :math:`\sum_p e_{ji,pq} = s_{i,q}`; with <= as printed, the zero vector makes resharding free."""
        return sum(m.e[j, i, p, q] for p in self.strategies(j)) == m.s[i, q]

    def producer_marginal(self, m: Any, j: int, i: int, p: int) -> Any:
        r"""(23): :math:`\sum_q e_{ji,pq} = s_{j,p}`; an equality as (22)."""
        return sum(m.e[j, i, p, q] for q in self.strategies(i)) == m.s[j, p]

    def strategies(self, i: int) -> range:
        """Strategies of an operator."""
        return range(len(self.cost[i]))

    def with_strategies(self, indices: Iterable[Index]) -> list[Index]:
        """Indices that end with an operator, each with all of its strategies behind it."""
        return [(*at, p) for at in indices for p in self.strategies(at[-1])]

    def with_costly_pairs(self, indices: Iterable[Index]) -> list[Index]:
        """Indices that end with an operator, each with all pairs ``j, p, q`` of its edges behind that cost or hold."""
        into: dict[int, list[Index]] = {}
        for (j, i), table in self.resharding.items():
            held = sum(np.abs(extra.pairs[j]) for extra in self.graph.extras_at[i] if j in extra.pairs)
            into.setdefault(i, []).extend((j, p, q) for p, q in np.argwhere(np.array(table) + held).tolist())
        return [(*at, *pair) for at in indices for pair in into.get(at[-1], ())]

    def execution(self, m: Any) -> Any:
        r""":math:`\sum_i s_i^T (c_i + d_i) + \sum_{(v_j, v_i) \in E} e_{ji}^T R_{ji}`: everything runs once."""
        return sum(self.cost[i][p] * m.s[i, p] for i, p in m.s) + sum(
            self.resharding[j, i][p][q] * m.e[j, i, p, q] for j, i, p, q in m.e
        )

    def bytes_of(self, i: int, chosen: Any, at: Sequence[int]) -> Any:
        """:math:`s_i^T mem_i`, where ``chosen[*at, p]`` stands for :math:`s_{i,p}`."""
        return sum(amount * chosen[(*at, p)] for p, amount in enumerate(self.mem[i]))

    def extra_bytes(self, extra: Extra, own: Callable[[int], Any], pair: Callable[[int, int, int], Any]) -> Any:
        """Bytes of an extra; ``own(q)`` stands for :math:`s_{i,q}`, ``pair(j, p, q)`` for :math:`e_{ji,pq}`."""
        unit = self.graph.byte_unit
        return sum(amount // unit * own(q) for q, amount in enumerate(extra.own.tolist()) if amount) + sum(
            int(table[p, q]) // unit * pair(j, p, q)
            for j, table in extra.pairs.items()
            for p, q in np.argwhere(table).tolist()
        )

    def of_first_run(self, m: Any, extra: Extra) -> Any:
        """Bytes of an extra when its operator runs for the first time."""
        i = extra.operator
        return self.extra_bytes(extra, lambda q: m.s[i, q], lambda j, p, q: m.e[j, i, p, q])

    def freed(self, m: Any, n: int, t: int, k: int) -> Any:
        """Bytes of inputs of ``k`` that its extra ``n`` frees in step ``t``; ``copied[t, k, n, j, p]`` says which."""
        extra = self.graph.extras_at[k][n]
        return sum(self.mem[j][p] * m.copied[t, k, n, j, p] for j in extra.freed for p in self.strategies(j))

    def freed_columns(self, moments: Iterable[Index]) -> list[Index]:
        """Indices of ``copied`` for steps, operators and extras."""
        return [
            (t, k, n, j, p) for t, k, n in moments for j in self.graph.extras_at[k][n].freed for p in self.strategies(j)
        ]

    def copied_so(self, m: Any, t: int, k: int, n: int, j: int, p: int) -> Any:
        """Only under pairs of strategies that are copied."""
        flags = self.graph.extras_at[k][n].freed[j][p]
        return m.copied[t, k, n, j, p] <= sum(m.e[j, k, p, q] for q in np.flatnonzero(flags).tolist())

    def kept(self, m: Any, i: int) -> Any:
        """Extras that are held to the end once an operator has run."""
        return sum(self.of_first_run(m, extra) for extra in self.graph.kept_extras[i])

    def chosen(self, m: Any) -> tuple[int, ...]:
        """Read the strategy of every operator."""
        return tuple(
            max(self.strategies(i), key=lambda p: float(m.s[i, p].value)) for i in range(len(self.graph.operators))
        )
