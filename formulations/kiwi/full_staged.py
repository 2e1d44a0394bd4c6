r"""KIWI's full problem (equations 1, 12-23) as an exact model that is small enough to prove.

Columns are one-hot classes of strategies, one configuration per operator
(:mod:`formulations.kiwi.configurations`), and for stages ``t`` and operators ``i < t``

.. math:: A_{t,i} = 1 \text{ if } i \text{ is computed again in stage } t, \qquad
          B_{t,i} = 1 \text{ if } i \text{ is carried into stage } t .

================================================  ==========================================
one class per operator, its configuration         :meth:`StagedModel._add_configurations`
(12), (14): inputs are computed or carried        :meth:`StagedModel._add_stages`
(13): what is carried was there before            :meth:`StagedModel._add_stages`
(16)-(20): memory at each stage's own operator    :meth:`StagedModel._add_own_moment`
(16)-(20): memory at a computation before it      :meth:`StagedModel._add_moment`
(1): recomputations, counted                      :meth:`StagedModel._add_recomputations`
================================================  ==========================================

Both are split by the bytes of ``i``: one column per *level*, an amount that occurs among its classes, at most
the sum of the classes of that amount. So the bytes of what is there are a sum of columns, where a product of a
binary and a class would have to be linearised, and costs, too, follow classes: the relaxation is tighter.

Counted recompute: with ``R_i`` computations of ``i`` beyond the first, the cost is ``(1 + R_i)`` times that of its
configuration ``c``. One more copy of the configuration columns, ``a_c <= c``, pays the first recomputation, and
``w_c <= T a_c`` with an integer ``sum_c w_c = R_i - 1`` pays all further ones; both level by level.

At a stage's own moment nothing more is needed: what is there besides inputs and output is carried on, ``B_{t+1,i}``.
Moments of recomputations get rows only where a replay finds too much. So the model is a relaxation until
:meth:`StagedModel.refine` finds nothing to add: its bound holds at any time, and its optimum is optimal once its
replay fits.

Repairs of open points: equality in (22)-(23), here by configurations; a value frees itself in (19);
parameters are a constant block (15); nothing is carried and computed at once (17); values that stay are
carried beyond the last stage (20); (16) is <=.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from formulations.encodings.integer_program import IntegerProgram, ProgramBuilder
from formulations.kiwi.configurations import configurations
from formulations.kiwi.graph import KiwiGraph
from formulations.kiwi.schedule import StagedDecision, tidy

Moment = tuple[int, int]
"""A stage and an operator that is computed in it."""

_Term = tuple[int, int]


class StagedModel:
    """The program of a graph under a memory limit.

    Parameters
    ----------
    graph
        The instance.
    memory_limit
        Bytes on one device.

    Raises
    ------
    GraphError
        If an operator has too many configurations.
    """

    def __init__(self, graph: KiwiGraph, memory_limit: int) -> None:
        self.graph, self.memory_limit = graph, memory_limit
        self.first, self.stages = graph.residents, graph.stages
        self.configurations = configurations(graph)
        self._units = [[amount // graph.byte_unit for amount in of] for of in self.configurations.class_bytes]
        self._levels = [sorted(set(amounts)) for amounts in self._units]
        self._builder = ProgramBuilder()
        self._class: list[list[int]] = []
        self._configuration: dict[int, list[int]] = {}
        self._computed: dict[Moment, list[int]] = {}
        self._carried: dict[Moment, list[int]] = {}
        self._watched: set[Moment] = set()
        self._add_configurations()
        self._add_stages()
        self._add_recomputations()
        for stage in range(self.stages):
            self._add_own_moment(stage)

    def program(self) -> IntegerProgram:
        """Return the program with everything that was added so far."""
        return self._builder.build()

    def decision(self, values: NDArray[np.float64]) -> StagedDecision:
        """Read strategies and stages from a solution; computations without use are left out."""
        chosen = tuple(int(np.argmax(values[columns])) for columns in self._class)
        stages = [
            [*(i for i in self._again(stage) if values[self._computed[stage, i]].sum() > 0.5), self.first + stage]
            for stage in range(self.stages)
        ]
        return StagedDecision(self.configurations.strategies(chosen), tidy(self.graph, stages))

    def refine(self, over: Iterable[Moment]) -> bool:
        """Add what a replay found missing; whether there was anything.

        Parameters
        ----------
        over
            Moments of the replay of a :meth:`decision` that exceed the limit.
        """
        moments = {(t, i) for t, i in over if i != self.first + t} - self._watched
        for moment in sorted(moments):
            self._add_moment(*moment)
        return bool(moments)

    def may_compute_again(self, stage: int, operator: int) -> bool:
        """Whether an earlier operator, whose value does not stay, may be computed again in a stage."""
        return True

    def forbid_both(self, one: Moment, other: Moment) -> None:
        """Let at most one of two repeated computations happen."""
        self._builder.at_most(_plus([*self._computed[one], *self._computed[other]]), 1)

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
            for i in self._passing(stage):
                self._carried[stage, i] = self._split_binary(i)
                if self.may_compute_again(stage, i):
                    self._computed[stage, i] = self._split_binary(i)
                for level, there in enumerate(self._there(stage, i)):
                    self._builder.at_most([*_plus(there), *self._minus_level(i, level)], 0)
        for stage in range(self.stages):
            for i in self._inputs(self.first + stage):
                for level, there in enumerate(self._there(stage, i)):
                    self._builder.equal([*_plus(there), *self._minus_level(i, level)], 0)
            for reader in self._again(stage):
                for i in self._inputs(reader):
                    there = [column for columns in self._there(stage, i) for column in columns]
                    self._builder.at_least([*_plus(there), *_minus(self._computed[stage, reader])], 0)
            if stage + 1 < self.stages:
                for i in self._passing(stage):
                    for there, carried in zip(self._there(stage, i), self._carried[stage + 1, i], strict=True):
                        self._builder.at_least([*_plus(there), (carried, -1)], 0)

    def _add_own_moment(self, stage: int) -> None:
        """Add memory right after a stage's own operator: its inputs and output, and what is carried on."""
        own = self.first + stage
        inputs = self._inputs(own)
        terms: list[_Term] = []
        if stage + 1 < self.stages:
            for i in self._passing(stage):
                if i not in inputs:
                    terms += self._bytes_while(i, self._carried[stage + 1, i])
        self._add_memory_row([*range(self.first), *self._staying(own), own, *inputs], terms)

    def _add_moment(self, stage: int, at: int) -> None:
        """Add memory at ``at`` in a stage; where ``at`` is not computed there, this much is held later as well."""
        self._watched.add((stage, at))
        terms: list[_Term] = []
        whole = [*range(self.first), *self._staying(self.first + stage)]
        for i in self._passing(stage):
            if i > at:
                terms += self._bytes_while(i, self._carried[stage, i])
            elif i in self.graph.parents[self.first + stage]:
                whole.append(i)
            else:
                terms += self._bytes_while(i, self._held(stage, at, i))
        self._add_memory_row(whole, terms)

    def _held(self, stage: int, at: int, i: int) -> list[int]:
        """Add binaries per level that say whether a value is still there after ``at`` has run in a stage."""
        held = self._split_binary(i)
        for level, column in enumerate(held):
            self._builder.at_most([(column, 1), *self._minus_level(i, level)], 0)
        if stage + 1 < self.stages:
            for column, carried in zip(held, self._carried[stage + 1, i], strict=True):
                self._builder.at_least([(column, 1), (carried, -1)], 0)
        for reader in self._again(stage):
            if (reader >= at and i in self.graph.parents[reader]) or reader == i == at:
                self._builder.at_least([*_plus(held), *_minus(self._computed[stage, reader])], 0)
        return held

    def _add_recomputations(self) -> None:
        """Add the cost of computing again, equation (1); see the module docstring."""
        for i in self._passing(self.stages - 1):
            again = [columns for (_, j), columns in self._computed.items() if j == i]
            if not again:
                continue
            entries = self.configurations.tables[i].entries
            once = [self._builder.continuous(0, 1, entry.cost) for entry in entries]
            for column, configuration in zip(once, self._configuration[i], strict=True):
                self._builder.at_most([(column, 1), (configuration, -1)], 0)
            for level, amount in enumerate(self._levels[i]):
                members = [k for k, entry in enumerate(entries) if self._units[i][entry.own] == amount]
                counted = _plus(once[k] for k in members)
                for columns in again:
                    self._builder.at_least([*counted, (columns[level], -1)], 0)
                if len(again) > 1:
                    most = len(again) - 1
                    further = self._builder.integer(0, most)
                    paid = [self._builder.continuous(0, most, entries[k].cost) for k in members]
                    for column, k in zip(paid, members, strict=True):
                        self._builder.at_most([(column, 1), (once[k], -most)], 0)
                    self._builder.equal([*_plus(paid), (further, -1)], 0)
                    self._builder.at_least([*counted, (further, 1), *_minus(columns[level] for columns in again)], 0)

    # --------------------------------------------------------------- pieces

    def _split_binary(self, value: int) -> list[int]:
        """Add a binary as one column per level of a value's bytes; at most one of them is one."""
        return [self._builder.binary() for _ in self._levels[value]]

    def _minus_level(self, value: int, level: int) -> list[_Term]:
        """Minus whether a value's class has the bytes of a level."""
        amount = self._levels[value][level]
        return _minus(c for c, a in zip(self._class[value], self._units[value], strict=True) if a == amount)

    def _bytes_while(self, value: int, split: list[int]) -> list[_Term]:
        """Bytes of a value while a split binary is one."""
        return list(zip(split, self._levels[value], strict=True))

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

    def _there(self, stage: int, i: int) -> list[list[int]]:
        """Per level the columns that say that a value is computed in a stage or carried into it."""
        computed = self._computed.get((stage, i))
        carried = self._carried[stage, i]
        return (
            [[column] for column in carried]
            if computed is None
            else list(map(list, zip(carried, computed, strict=True)))
        )

    def _inputs(self, operator: int) -> list[int]:
        """Values that an operator reads and that do not stay anyway."""
        return [i for i in self.graph.parents[operator] if not self.graph.operators[i].stays]

    def _passing(self, stage: int) -> list[int]:
        """Values of earlier operators that do not stay."""
        return [i for i in range(self.first, self.first + stage) if not self.graph.operators[i].stays]

    def _again(self, stage: int) -> list[int]:
        """Operators that a stage may compute again."""
        return [i for i in self._passing(stage) if (stage, i) in self._computed]

    def _staying(self, before: int) -> list[int]:
        """Values that stay, of operators before one."""
        return [i for i in range(self.first, before) if self.graph.operators[i].stays]


def _plus(columns: Iterable[int]) -> list[_Term]:
    return [(column, 1) for column in columns]


def _minus(columns: Iterable[int]) -> list[_Term]:
    return [(column, -1) for column in columns]
