"""Arrays that many tables share, looked at once each: in a model of repeated layers most tables are the same few."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from formulations.presolve.workspace.state import Integers
from formulations.problem.strategy_problem import IntArray


def distinct(arrays: Sequence[Integers]) -> tuple[list[Integers], IntArray]:
    """Return each array once, and for all of them which one it is."""
    places: dict[int, int] = {}
    place = np.array([places.setdefault(id(array), len(places)) for array in arrays], dtype=np.int64)
    found: list[Integers] = [arrays[k] for k in np.unique(place, return_index=True)[1].tolist()]
    return found, place


def extremes(arrays: Sequence[Integers]) -> tuple[Integers, Integers]:
    """Return the smallest and the largest entry of each array; none may be empty."""
    found, place = distinct(arrays)
    if not found:
        nothing: IntArray = np.zeros(0, dtype=np.int64)
        return nothing, nothing
    joined = np.concatenate([array.ravel() for array in found])
    begins = np.cumsum([0, *(array.size for array in found)])[:-1]
    return np.minimum.reduceat(joined, begins)[place], np.maximum.reduceat(joined, begins)[place]
