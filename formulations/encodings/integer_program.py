"""A mixed-integer linear program as arrays, with exact integers throughout.

For formulations that are no canonical problem: a builder adds columns and rows, and returns the numbers of the columns.
Rows may hold large integers (bytes); a solver scales them, and :meth:`IntegerProgram.broken_rows` decides in exact
integers whether a solution satisfies them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from formulations.problem.strategy_problem import BoolArray, IntArray

Terms = Iterable[tuple[int, int]]
"""Pairs of column and coefficient; a column may occur several times."""


@dataclass(frozen=True, slots=True, eq=False)
class IntegerProgram:
    """``min cost @ x`` subject to ``row_lower <= A x <= row_upper`` and bounds, some columns integer.

    Parameters
    ----------
    cost
        Per column, in quanta.
    lower, upper
        Bounds per column.
    is_integer
        Per column.
    row_start, row_column, row_value
        Rows in CSR form, exact integers.
    row_lower, row_upper
        Per row an integer, or None where there is no bound.
    """

    cost: IntArray
    lower: IntArray
    upper: IntArray
    is_integer: BoolArray
    row_start: IntArray
    row_column: IntArray
    row_value: IntArray
    row_lower: tuple[int | None, ...]
    row_upper: tuple[int | None, ...]

    @property
    def columns(self) -> int:
        """Number of columns."""
        return int(self.cost.shape[0])

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.row_lower)

    def row(self, index: int) -> tuple[IntArray, IntArray]:
        """Columns and coefficients of one row."""
        entries = slice(int(self.row_start[index]), int(self.row_start[index + 1]))
        return self.row_column[entries], self.row_value[entries]

    def broken_rows(self, values: NDArray[np.float64]) -> list[int]:
        """Return the rows without continuous columns that integer values break, in exact integers."""
        broken = []
        for index in range(self.rows):
            columns, coefficients = self.row(index)
            if not self.is_integer[columns].all():
                continue
            total = sum(a * round(x) for a, x in zip(coefficients.tolist(), values[columns].tolist(), strict=True))
            low, high = self.row_lower[index], self.row_upper[index]
            if (low is not None and total < low) or (high is not None and total > high):
                broken.append(index)
        return broken


class ProgramBuilder:
    """Builder of an integer program, by columns and rows."""

    def __init__(self) -> None:
        self._cost: list[int] = []
        self._lower: list[int] = []
        self._upper: list[int] = []
        self._is_integer: list[bool] = []
        self._row_start: list[int] = [0]
        self._row_column: list[int] = []
        self._row_value: list[int] = []
        self._row_lower: list[int | None] = []
        self._row_upper: list[int | None] = []

    def binary(self, cost: int = 0) -> int:
        """Add a binary column and return its number."""
        return self.integer(0, 1, cost)

    def integer(self, lower: int, upper: int, cost: int = 0) -> int:
        """Add an integer column and return its number."""
        return self._column(lower, upper, True, cost)

    def continuous(self, lower: int, upper: int, cost: int = 0) -> int:
        """Add a continuous column and return its number."""
        return self._column(lower, upper, False, cost)

    def binaries(self, costs: Sequence[int]) -> list[int]:
        """Add binary columns of which exactly one is chosen."""
        columns = [self.binary(int(cost)) for cost in costs]
        self.equal([(column, 1) for column in columns], 1)
        return columns

    def _column(self, lower: int, upper: int, is_integer: bool, cost: int) -> int:
        self._cost.append(cost)
        self._lower.append(lower)
        self._upper.append(upper)
        self._is_integer.append(is_integer)
        return len(self._cost) - 1

    def at_most(self, terms: Terms, upper: int) -> None:
        """Add ``sum(terms) <= upper``."""
        self._row(terms, None, upper)

    def at_least(self, terms: Terms, lower: int) -> None:
        """Add ``sum(terms) >= lower``."""
        self._row(terms, lower, None)

    def equal(self, terms: Terms, value: int) -> None:
        """Add ``sum(terms) == value``."""
        self._row(terms, value, value)

    def _row(self, terms: Terms, lower: int | None, upper: int | None) -> None:
        total: dict[int, int] = {}
        for column, coefficient in terms:
            total[column] = total.get(column, 0) + coefficient
        for column, coefficient in total.items():
            if coefficient:
                self._row_column.append(column)
                self._row_value.append(coefficient)
        self._row_start.append(len(self._row_column))
        self._row_lower.append(lower)
        self._row_upper.append(upper)

    def build(self) -> IntegerProgram:
        """Return the program so far; more may be added afterwards."""
        return IntegerProgram(
            np.array(self._cost, dtype=np.int64),
            np.array(self._lower, dtype=np.int64),
            np.array(self._upper, dtype=np.int64),
            np.array(self._is_integer, dtype=np.bool_),
            np.array(self._row_start, dtype=np.int64),
            np.array(self._row_column, dtype=np.int64),
            np.array(self._row_value, dtype=np.int64),
            tuple(self._row_lower),
            tuple(self._row_upper),
        )
