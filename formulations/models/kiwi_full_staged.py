r"""KIWI's full problem (equations 1, 12-23) as an exact model that is small enough to prove.

Columns are one-hot classes of strategies, one configuration per operator
(:mod:`formulations.models.kiwi_configurations`), and for stages ``t`` and operators ``i < t``

.. math:: A_{t,i} = 1 \text{ if } i \text{ is computed again in stage } t, \qquad
          B_{t,i} = 1 \text{ if } i \text{ is carried into stage } t .

================================================  ==========================================
one class per operator, its configuration         :meth:`StagedModel._add_configurations`
(12), (14): inputs are computed or carried        :meth:`StagedModel._add_stages`
(13): what is carried was there before            :meth:`StagedModel._add_stages`
(16)-(20): memory at each stage's own operator    :meth:`StagedModel._add_own_moment`
(16)-(20): memory at a computation before it      :meth:`StagedModel.watch`
(1): recomputations, counted                      :meth:`StagedModel._add_recomputations`
================================================  ==========================================

Counted recompute: with ``R_i`` computations of ``i`` beyond the first, the cost is ``(1 + R_i)`` times that
of its configuration ``c``. One more copy of the configuration columns, ``a_c <= c``, pays the first
recomputation; ``w_c <= (T - 1) c`` with an integer sum pays the rest exactly.

Memory rows are in positive knapsack form: the bytes of value ``i`` while a binary ``L`` says that it is
there are ``small * L + sum_q delta_q * Q_q`` with ``Q_q >= L + (class at least as large as q) - 1``. A stage's
own moment needs no further binaries: what is there besides its inputs and output is carried on, ``L = B_{t+1,i}``.
Moments of recomputations are watched only where a replay finds too much: the model without them is a relaxation,
so that its bound holds, and its optimum is optimal once its replay fits.

Repairs of open points: equality in (22)-(23), here by configurations; a value frees itself in (19);
parameters are a constant block (15); nothing is carried and computed at once (17); values that stay are
carried beyond the last stage (20); (16) is <=.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from formulations.integer_program import IntegerProgram, ProgramBuilder
from formulations.models.kiwi_configurations import configurations
from formulations.models.kiwi_graph import KiwiGraph
from formulations.models.kiwi_schedule import StagedDecision, tidy

Moment = tuple[int, int]
"""A stage and an operator that is computed in it."""

_Term = tuple[int, int]


class StagedModel:
    """The program of a graph under a memory limit; moments to watch may be added at any time.

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
        self.configurations = configurations(graph)
        self._units = [[amount // graph.byte_unit for amount in of] for of in self.configurations.class_bytes]
        self.watched: set[Moment] = set()
        self._builder = ProgramBuilder()
        self._bytes_terms: dict[tuple[int, int], list[_Term]] = {}
        self._class: list[list[int]] = []
        self._computed: dict[Moment, int] = {}
        self._carried: dict[Moment, int] = {}
        self._configuration: dict[int, list[int]] = {}
        self._again: dict[int, list[int]] = {}
        self._more: dict[int, tuple[list[int], int]] = {}
        self._add_configurations()
        self._add_stages()
        self._add_recomputations()
        for stage in range(self.stages):
            self._add_own_moment(stage)

    def program(self) -> IntegerProgram:
        """Return the program with everything that is watched so far."""
        return self._builder.build()

    def decision(self, values: NDArray[np.float64]) -> StagedDecision:
        """Read strategies and stages from a solution; computations without use are left out."""
        chosen = tuple(int(np.argmax(values[columns])) for columns in self._class)
        stages = [
            [*(i for i in self._repeatable(stage) if values[self._computed[stage, i]] > 0.5), self.first + stage]
            for stage in range(self.stages)
        ]
        return StagedDecision(self.configurations.strategies(chosen), tidy(self.graph, stages))

    # ------------------------------------------------------------- families

    def _add_configurations(self) -> None:
        """Add classes and configurations, tied by their marginals; a configuration's column pays one execution."""
        self._class = [self._builder.binaries([0] * len(classes)) for classes in self.configurations.classes]
        for i in range(self.first, len(self.graph.operators)):
            table = self.configurations.tables[i]
            columns = [self._builder.continuous(0, 1, entry.cost) for entry in table.entries]
            self._configuration[i] = columns
            for own, column in enumerate(self._class[i]):
                members = [(c, 1) for c, entry in zip(columns, table.entries, strict=True) if entry.own == own]
                self._builder.equal([*members, (column, -1)], 0)
            for axis, j in enumerate(table.neighbours):
                for other, column in enumerate(self._class[j]):
                    members = [
                        (c, 1) for c, entry in zip(columns, table.entries, strict=True) if entry.others[axis] == other
                    ]
                    self._builder.equal([*members, (column, -1)], 0)

    def _add_stages(self) -> None:
        """Add ``A`` and ``B`` with equations (12)-(14), and that nothing is carried and computed at once."""
        for stage in range(self.stages):
            for i in self._repeatable(stage):
                self._computed[stage, i], self._carried[stage, i] = self._builder.binary(), self._builder.binary()
                self._builder.at_most([(self._computed[stage, i], 1), (self._carried[stage, i], 1)], 1)
        for stage in range(self.stages):
            for reader in (*self._repeatable(stage), self.first + stage):
                for i in self._repeatable_among(self.graph.parents[reader]):
                    there = [(self._computed[stage, i], 1), (self._carried[stage, i], 1)]
                    if reader == self.first + stage:
                        self._builder.equal(there, 1)
                    else:
                        self._builder.at_least([*there, (self._computed[stage, reader], -1)], 0)
            for i in self._repeatable(stage):
                if stage + 1 < self.stages:
                    before = [(self._computed[stage, i], -1), (self._carried[stage, i], -1)]
                    self._builder.at_most([(self._carried[stage + 1, i], 1), *before], 0)

    def _add_own_moment(self, stage: int) -> None:
        """Add memory right after a stage's own operator: its inputs and output, and what is carried on."""
        own = self.first + stage
        whole = [*range(self.first), *self._staying(own), own, *self._repeatable_among(self.graph.parents[own])]
        terms: list[_Term] = []
        if stage + 1 < self.stages:
            for i in self._repeatable(stage):
                if i not in self.graph.parents[own]:
                    terms += self._bytes_while(i, self._carried[stage + 1, i])
        self._add_memory_row(whole, terms)

    def watch(self, moments: Iterable[Moment]) -> bool:
        """Add memory right after computations that come before their stage's own operator; whether any was new."""
        new = [(t, i) for t, i in moments if i != self.first + t and (t, i) not in self.watched]
        for moment in new:
            self.watched.add(moment)
            self._add_moment(*moment)
        return bool(new)

    def _add_moment(self, stage: int, at: int) -> None:
        """Add memory at ``at`` in a stage; where ``at`` is not computed there, this much is held later as well."""
        terms: list[_Term] = []
        for i in self._repeatable(stage):
            if i > at:
                terms += self._bytes_while(i, self._carried[stage, i])
                continue
            held = self._builder.binary()
            causes = [self._computed[stage, j] for j in self._repeatable(stage) if j >= at and i in self._reads(j)]
            causes += [self._computed[stage, i]] if i == at else []
            causes += [self._carried[stage + 1, i]] if stage + 1 < self.stages else []
            for cause in causes:
                self._builder.at_least([(held, 1), (cause, -1)], 0)
            if i in self._reads(self.first + stage):
                self._builder.at_least([(held, 1)], 1)
            terms += self._bytes_while(i, held)
        self._add_memory_row([*range(self.first), *self._staying(self.first + stage)], terms)

    def _add_recomputations(self) -> None:
        """Add the cost of computing again, equation (1); see the module docstring."""
        for i in self._repeatable(self.stages - 1):
            again = [self._computed[stage, i] for stage in range(i + 1 - self.first, self.stages)]
            costs = [entry.cost for entry in self.configurations.tables[i].entries]
            once = [self._builder.continuous(0, 1, cost) for cost in costs]
            for column, configuration in zip(once, self._configuration[i], strict=True):
                self._builder.at_most([(column, 1), (configuration, -1)], 0)
            for computed in again:
                self._builder.at_least([*((column, 1) for column in once), (computed, -1)], 0)
            most = len(again) - 1
            more = self._builder.integer(0, most)
            paid = [self._builder.continuous(0, most, cost) for cost in costs]
            for column, first in zip(paid, once, strict=True):
                self._builder.at_most([(column, 1), (first, -most)], 0)
            self._builder.equal([*((column, 1) for column in paid), (more, -1)], 0)
            counted = [*((column, 1) for column in once), (more, 1)]
            self._builder.at_least([*counted, *((computed, -1) for computed in again)], 0)
            self._again[i], self._more[i] = once, (paid, more)

    # --------------------------------------------------------------- pieces

    def _add_memory_row(self, whole: Sequence[int], terms: list[_Term]) -> None:
        """Add one knapsack row: values that are there whatever is decided, and terms of the others."""
        least = 0
        for i in whole:
            amounts = self._units[i]
            least += min(amounts)
            terms = terms + [
                (column, amount - min(amounts)) for column, amount in zip(self._class[i], amounts, strict=True)
            ]
        self._builder.at_most(terms, self.memory_limit // self.graph.byte_unit - least)

    def _bytes_while(self, value: int, held: int) -> list[_Term]:
        """Bytes of a value while the binary ``held`` is one, in positive knapsack form."""
        if (value, held) not in self._bytes_terms:
            amounts = self._units[value]
            levels = sorted(set(amounts))
            terms = [(held, levels[0])]
            for below, level in pairwise(levels):
                extra = self._builder.binary()
                as_large = [column for column, a in zip(self._class[value], amounts, strict=True) if a >= level]
                self._builder.at_least([(extra, 1), (held, -1), *((column, -1) for column in as_large)], -1)
                terms.append((extra, level - below))
            self._bytes_terms[value, held] = terms
        return self._bytes_terms[value, held]

    def _reads(self, operator: int) -> tuple[int, ...]:
        return self.graph.parents[operator]

    def _repeatable(self, stage: int) -> list[int]:
        """Operators that a stage may compute again."""
        return self._repeatable_among(range(self.first, self.first + stage))

    def _repeatable_among(self, operators: Iterable[int]) -> list[int]:
        return [i for i in operators if not self.graph.operators[i].stays]

    def _staying(self, before: int) -> list[int]:
        """Values that stay, of operators before one."""
        return [i for i in range(self.first, before) if self.graph.operators[i].stays]
