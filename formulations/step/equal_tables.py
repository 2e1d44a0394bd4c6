"""Equal tables as one array.

A deep model has few distinct layers, so most of its tables are equal. Kept as one object each, they fit into
memory, travel to workers once, and solvers that ask for identity share the work on them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

_Table = TypeVar("_Table", bound=NDArray[Any])


class EqualTables:
    """Gives back the first of all equal tables, and makes a table once that is made of others."""

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
        """A table that is made once of the same objects; never changed, since others share it.

        Parameters
        ----------
        sources
            What it is made of: best the first of their equals, since equal objects are not the same.
        key
            What else it depends on, and what is made.
        make
            Makes it.
        """
        full = (*map(id, sources), *key)
        known = self._made.get(full)
        if known is None:
            # The sources are kept beside their ids, so that those cannot be used again.
            known = self._made[full] = (sources, self.one_of(make()))
        return known[1]  # type: ignore[return-value]
