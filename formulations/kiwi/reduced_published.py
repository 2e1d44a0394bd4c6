r"""KIWI with reduced complexity as published: equations (2)-(11) with the linearisation (24)-(31); for reproduction.

``m_i`` says whether forward operator ``i`` keeps its output (the
binary here is ``1 - m_i``: dropped), ``z_i`` (a constant) whether backward reads it,
``H_i`` (a constant) the first backward operator that does, before which a dropped output is computed again,
``h_i`` after which operator a forward output is freed for good, ``F[i, j]`` whether that is ``j``, and ``U_t``
the bytes after operator ``t``. Operators count from 1 here as in the paper, residents are ``U_0``.

==============================================  ======================================================
one strategy per operator, edges                :class:`~formulations.kiwi.linear.StrategyColumns`
(2) cost of recomputing                         :meth:`PublishedReducedModel._add_costs`
(9), (31) inputs of a recomputed one are kept   :meth:`PublishedReducedModel._add_kept_inputs`
(10), (24)-(28) time of the last free           :meth:`PublishedReducedModel._add_last_free`
(11), (29)-(30) which operator that is          :meth:`PublishedReducedModel._add_last_free`
(3)-(8) memory                                  :meth:`PublishedReducedModel._add_memory`
==============================================  ======================================================

A dropped output is computed again as part of the step of ``H_i``: (3) adds its bytes together with those of
``H_i``'s own output, and a kept input that waits for it (10) is freed after that step. True liveness
(:mod:`formulations.step.kiwi_reduced`) frees that input before ``H_i`` itself runs, so that its optimum may
be lower, never higher.

Open points kept: (8) is <=; frees counted at ``i + 1`` are those after operator ``i``, in (6) as in (7).

Open points repaired: (9) and (31) apply only where ``z_j = 1`` (their big constant then is the number of inputs);
the maximum in (10) ranges over children with ``z = 1``, ``H`` being undefined for others; ``delta`` in (29) is
1, because times are integers; edges have equality marginals; parameters are a constant block; values that stay
are never freed and never dropped.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from formulations.encodings.integer_program import IntegerProgram, ProgramBuilder
from formulations.kiwi.graph import KiwiGraph
from formulations.kiwi.linear import StrategyColumns, Term, at_least_both, at_most_both
from formulations.kiwi.schedule import StagedDecision, with_recomputed
from formulations.step.training_step import NodeKind


class PublishedReducedModel:
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
        self.first, self.count = graph.residents, graph.stages
        self._builder = ProgramBuilder()
        self._columns = StrategyColumns(self._builder, graph)
        self._last_free: dict[int, dict[int, int]] = {}
        self._dropped = {i: self._builder.binary() for i in graph.candidates}
        self._add_costs()
        self._add_kept_inputs()
        for i in range(self.first, len(graph.operators)):
            if graph.operators[i].kind is NodeKind.FORWARD:
                self._last_free[i] = self._add_last_free(i)
        self._add_memory()

    def program(self) -> IntegerProgram:
        """Return the program."""
        return self._builder.build()

    def decision(self, values: NDArray[np.float64]) -> StagedDecision:
        """Read strategies, and the stages that compute every dropped operator again at its ``H``."""
        strategies = tuple(int(np.argmax(values[columns])) for columns in self._columns.strategy)
        dropped = [i for i, column in self._dropped.items() if values[column] > 0.5]
        return StagedDecision(strategies, with_recomputed(self.graph, dropped))

    def refine(self, over: Iterable[tuple[int, int]]) -> bool:
        """Everything has its row already: return False."""
        return False

    # ------------------------------------------------------------- families

    def _add_costs(self) -> None:
        """Add (2) beyond the first computation: ``(1 - m_i) z_i`` times strategy and resharding."""
        for i, dropped in self._dropped.items():
            for column, cost in self._columns.paid(i):
                at_least_both(self._builder, dropped, column, cost)

    def _add_kept_inputs(self) -> None:
        """Add (31): a dropped operator's inputs are kept; those that are resident or have z = 0 always are."""
        for j, dropped in self._dropped.items():
            inputs = [self._dropped[i] for i in self.graph.parents[j] if i in self._dropped]
            if inputs:
                self._builder.at_most([(dropped, len(inputs)), *((column, 1) for column in inputs)], len(inputs))

    def _add_last_free(self, i: int) -> dict[int, int]:
        """Add (24)-(30) for one forward operator; return ``F[i, .]`` by operator."""
        last = self._count(max(self.graph.children[i], default=i))
        if self.graph.operators[i].stays:
            last = self.count + 1
        children = [j for j in self.graph.children[i] if j in self._dropped]
        never = self.count + 1
        time = self._builder.integer(0, never)
        is_maximum = self._builder.binaries([0] * (1 + len(children)))
        self._builder.at_least([(time, 1)], last)
        self._builder.at_most([(time, 1), (is_maximum[0], never)], last + never)
        for j, chosen in zip(children, is_maximum[1:], strict=True):
            recomputed = self._count(self.graph.first_backward_use[j])
            self._builder.at_least([(time, 1), (self._dropped[j], -recomputed)], 0)
            self._builder.at_most([(time, 1), (self._dropped[j], -recomputed), (chosen, never)], never)
        frees = {}
        for j in range(i, len(self.graph.operators)):
            at = self._count(j)
            is_before, frees[j], is_after = self._builder.binaries([0, 0, 0])
            self._builder.at_least([(time, 1), (frees[j], -at), (is_after, -(at + 1))], 0)
            self._builder.at_most([(time, 1), (is_before, -(at - 1)), (frees[j], -at), (is_after, -never)], 0)
        return frees

    def _add_memory(self) -> None:
        """Add (3)-(8): after each operator, what was there, what it and recomputation add, what was freed before."""
        before = [term for i in range(self.first) for term in self._columns.amounts(i)]
        for t in range(self.first, len(self.graph.operators)):
            terms = [*before, *self._columns.amounts(t)]
            for j, dropped in self._dropped.items():
                if self.graph.first_backward_use[j] == t:
                    terms += [
                        (at_least_both(self._builder, dropped, column), amount)
                        for column, amount in self._columns.amounts(j)
                    ]
            if t > self.first:
                terms += self._freed_after(t - 1)
            used = self._builder.continuous(0, self.memory_limit // self.graph.byte_unit)
            self._builder.equal([*terms, (used, -1)], 0)
            before = [(used, 1)]

    def _freed_after(self, t: int) -> list[Term]:
        """Bytes freed after an operator (6)-(7), negative."""
        terms: list[Term] = []
        for j, frees in self._last_free.items():
            if t in frees:
                terms += self._freed_if(frees[t], j)
            if j in self._dropped and self._last_forward_reader(j) == t:
                terms += self._freed_if(self._dropped[j], j)
        for j in range(self.first, t + 1):
            operator = self.graph.operators[j]
            is_last = max(self.graph.children[j], default=j) == t
            if operator.kind is NodeKind.BACKWARD and is_last and not operator.stays:
                terms += [(column, -amount) for column, amount in self._columns.amounts(j)]
        return terms

    # --------------------------------------------------------------- pieces

    def _freed_if(self, binary: int, j: int) -> list[Term]:
        """Bytes of an output where a binary is one, negative."""
        return [(at_most_both(self._builder, binary, column), -amount) for column, amount in self._columns.amounts(j)]

    def _last_forward_reader(self, i: int) -> int:
        forward = [j for j in self.graph.children[i] if self.graph.operators[j].kind is NodeKind.FORWARD]
        return max(forward, default=i)

    def _count(self, operator: int) -> int:
        """The paper's number of an operator, from 1."""
        return operator - self.first + 1
