"""A mixed-integer linear program as arrays, with exact integers throughout.

:class:`~formulations.encodings.pyomo_program.PyomoProgram` makes one of a Pyomo model, for solvers to read. Rows may
hold large integers (bytes). A solver scales them, and :meth:`IntegerProgram.broken_rows` decides in exact integers
whether a solution keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from formulations.problem.strategy_problem import BoolArray, IntArray


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
