"""Tables of the papers as cells: what is computed at once, with a label for progress.

A cell does not depend on the others of its table, so any of them can be computed again and compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

__all__ = ["Cell", "Row", "Table"]

Row = dict[str, Any]
"""Numbers and names that JSON can hold."""


@dataclass(frozen=True, slots=True)
class Cell:
    """Rows of a table that are computed together.

    Parameters
    ----------
    label
        For progress; unique within its table.
    rows
        Computes them.
    """

    label: str
    rows: Callable[[], Iterable[Row]]


@dataclass(frozen=True, slots=True)
class Table:
    """A table by its cells.

    Parameters
    ----------
    cells
        Makes the cells, in the order of the rows.
    timed
        Columns that depend on the speed of the machine: seconds that were measured, and what a search has found when
        its time ends.
    named_only
        Whether it is computed only where it is named, as it does not fit into the hour of all tables.
    """

    cells: Callable[[], Iterable[Cell]]
    timed: frozenset[str] = frozenset()
    named_only: bool = False
