r"""KIWI's full problem as published (equations 1, 12-23), linearised with Checkmate's method; for reproduction.

Stage ``t`` computes operator ``t`` for the first time and may run earlier ones again:
``A[t, i]`` computed, ``B[t, i]`` carried into the stage, ``U[t, k]`` bytes after operator ``k``,
``F[t, i, k]`` value ``i`` freed after ``k``, ``s`` strategies, ``e`` pairs of strategies of an edge.

===================================================  =======================================================
(21) one strategy per operator, (22)-(23) edges      :class:`~formulations.kiwi.linear.StrategyColumns`
(12)-(15) dependencies                               :meth:`PublishedModel._add_dependencies`
(1) cost of computing again                          :meth:`PublishedModel._add_costs`
(16)-(19) memory                                     :meth:`PublishedModel._add_memory`
(20) frees                                           :meth:`PublishedModel._add_free`
===================================================  =======================================================

Linearisation: a product of two binaries that costs or occupies becomes ``w >= a + b - 1``, one that frees
``w <= a, w <= b``. Of the product in (20) Checkmate (Jain et al., MLSys 2020, section 4.7) counts the *hazards*,
:math:`h = (1 - A_{t,k}) + B_{t+1,i} + \sum_{j > k} A_{t,j}`, and asks :math:`1 - F \le h \le \kappa (1 - F)`
with :math:`\kappa` the most hazards there can be.

Open points of the paper, kept: (16) is <=, as (8), because no solver can hold a strict bound.

Open points repaired: (22)-(23) are equalities, or the zero vector makes resharding free; ``e`` is the outer
product of the two one-hots; (19) and (20) free ``v_k`` itself too, or a recomputed value without use stays;
(14) and (15) contradict each other at ``t = i`` for parameters, which are a constant block of memory before
the first stage instead; (17) counts a value twice that is carried and computed in one stage, which is forbidden;
(20) reads ``B`` beyond the last stage, where it is 1 for values that stay and 0 for others.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from formulations.encodings.integer_program import IntegerProgram, ProgramBuilder
from formulations.kiwi.graph import KiwiGraph
from formulations.kiwi.linear import StrategyColumns, Term, at_least_both, at_most_both
from formulations.kiwi.schedule import StagedDecision, tidy


class PublishedModel:
    """The program of a graph under a memory limit.

    Parameters
    ----------
    graph
        The instance.
    memory_limit
        Bytes on one device.
    """

    def __init__(self, graph: KiwiGraph, memory_limit: int) -> None:
        self.graph, self.memory_limit = graph, memory_limit
        self.first, self.stages = graph.residents, graph.stages
        self._builder = ProgramBuilder()
        self._columns = StrategyColumns(self._builder, graph)
        self._computed: dict[tuple[int, int], int] = {}
        self._carried: dict[tuple[int, int], int] = {}
        self._add_dependencies()
        self._add_costs()
        for stage in range(self.stages):
            self._add_memory(stage)

    def program(self) -> IntegerProgram:
        """Return the program."""
        return self._builder.build()

    def decision(self, values: NDArray[np.float64]) -> StagedDecision:
        """Read strategies and stages from a solution; computations without use are left out."""
        strategies = tuple(int(np.argmax(values[columns])) for columns in self._columns.strategy)
        stages = [
            [i for i in self._operators(stage) if values[self._computed[stage, i]] > 0.5]
            for stage in range(self.stages)
        ]
        return StagedDecision(strategies, tidy(self.graph, stages))

    def refine(self, over: Iterable[tuple[int, int]]) -> bool:
        """Everything has its row already: return False."""
        return False

    # ------------------------------------------------------------- families

    def _add_dependencies(self) -> None:
        """Add ``A`` and ``B`` with (12)-(14); what stays is carried, and nothing is carried and computed at once."""
        for stage in range(self.stages):
            own = self.first + stage
            for i in self._operators(stage):
                self._computed[stage, i] = self._builder.integer(int(i == own), 1)
                if i < own:
                    self._carried[stage, i] = self._builder.integer(int(self.graph.operators[i].stays), 1)
                    self._builder.at_most(self._there(stage, i), 1)
        for stage in range(self.stages):
            for j in self._operators(stage):
                for i in self.graph.parents[j]:
                    self._builder.at_least([*self._there(stage, i), (self._computed[stage, j], -1)], 0)
            if stage:
                for i in self._operators(stage - 1):
                    self._builder.at_least([*self._there(stage - 1, i), (self._carried[stage, i], -1)], 0)

    def _add_costs(self) -> None:
        """Add (1) for computations beyond the first, which strategies and pairs have paid already."""
        for stage in range(self.stages):
            for i in self._operators(stage - 1):
                for column, cost in self._columns.paid(i):
                    at_least_both(self._builder, self._computed[stage, i], column, cost)

    def _add_memory(self, stage: int) -> None:
        """Add (16)-(19): carried values at the start, then per operator its output and what was freed before."""
        resident = [term for i in range(self.first) for term in self._columns.amounts(i)]
        carried = [term for i in self._operators(stage - 1) for term in self._amounts_while(self._carried[stage, i], i)]
        before = self._use([*resident, *carried])
        for k in self._operators(stage):
            change = [(before, 1), *self._amounts_while(self._computed[stage, k], k)]
            if k > self.first:
                change += self._add_free(stage, k - 1)
            before = self._use(change)

    def _add_free(self, stage: int, k: int) -> list[Term]:
        """Add (20) for ``k``'s inputs and ``k`` itself; return the bytes that are freed after it, negative."""
        freed: list[Term] = []
        for i in (*self.graph.parents[k], k):
            later = [j for j in self.graph.children[i] if k < j <= self.first + stage]
            hazards = [(self._computed[stage, k], -1), *((self._computed[stage, j], 1) for j in later)]
            kept_on = 0
            if stage + 1 < self.stages:
                hazards.append((self._carried[stage + 1, i], 1))
            elif self.graph.operators[i].stays:
                kept_on = 1
            free = self._builder.binary()
            most = 2 + len(later)
            self._builder.at_least([*hazards, (free, 1)], -kept_on)
            self._builder.at_most([*hazards, (free, most)], most - 1 - kept_on)
            freed += [
                (at_most_both(self._builder, free, column), -amount) for column, amount in self._columns.amounts(i)
            ]
        return freed

    # --------------------------------------------------------------- pieces

    def _use(self, terms: list[Term]) -> int:
        """Add a column for bytes that equal ``terms`` and stay within the limit."""
        used = self._builder.continuous(0, self.memory_limit // self.graph.byte_unit)
        self._builder.equal([*terms, (used, -1)], 0)
        return used

    def _amounts_while(self, binary: int, i: int) -> list[Term]:
        """Bytes of a value while a binary is one."""
        return [(at_least_both(self._builder, binary, column), amount) for column, amount in self._columns.amounts(i)]

    def _there(self, stage: int, i: int) -> list[Term]:
        """Whether a value is computed in a stage or carried into it."""
        carried = self._carried.get((stage, i))
        return [(self._computed[stage, i], 1), *([] if carried is None else [(carried, 1)])]

    def _operators(self, stage: int) -> range:
        """Operators up to a stage's own."""
        return range(self.first, self.first + stage + 1)
