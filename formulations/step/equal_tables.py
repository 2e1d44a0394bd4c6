"""Equal tables as one array.

A deep model has few distinct layers, so most of its tables are equal. Kept as one object each, they fit into
memory, are sent to workers once, and solvers that compare by identity share the work on them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_Table = TypeVar("_Table", bound=NDArray[Any])


class EqualTables:
    """Cache of tables: one object for all equal tables, and for all tables made from the same objects."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], NDArray[Any]] = {}
        self._firsts: set[int] = set()
        self._made: dict[tuple[object, ...], tuple[tuple[NDArray[Any], ...], NDArray[Any]]] = {}

    def one_of(self, table: _Table) -> _Table:
        """The first table that was equal to this one: same shape, type and entries."""
        if id(table) in self._firsts:
            return table
        content = hashlib.blake2b(np.ascontiguousarray(table).data, digest_size=16).digest()
        first = self._known.setdefault((table.shape, table.dtype.str, content), table)
        if first is table:
            self._firsts.add(id(table))  # it stays among the known ones, so its id cannot be used again
        return first  # type: ignore[return-value]

    def made_of(self, sources: tuple[NDArray[Any], ...], key: tuple[object, ...], make: Callable[[], _Table]) -> _Table:
        """A table made once from the same objects; shared, so it must not be changed.

        Parameters
        ----------
        sources
            Objects that it is made from, compared by identity: results of :meth:`one_of`.
        key
            Kind of the table, and further values that it depends on.
        make
            Makes it.
        """
        full = (*map(id, sources), *key)
        known = self._made.get(full)
        if known is None:
            # The sources are kept beside their ids, so that those cannot be used again.
            known = self._made[full] = (sources, self.one_of(make()))
        return known[1]  # type: ignore[return-value]
