"""A table over several nodes as few boxes, each a product of sets of strategies with one value.

A node whose strategies are boxes can stand for the table where only pairs of nodes may be tied: box ``b`` is allowed
with strategy ``s`` of axis ``k`` if ``s`` is in the box's set of that axis. A box may hold entries below its
value: in an optimum they are covered by another box, which has their own value.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from formulations.problem.strategy_problem import BoolArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class BoxCover:
    """Boxes that cover a table.

    Parameters
    ----------
    sides
        Per axis, which strategies each box holds; shape ``(S_axis, boxes)``.
    values
        Value of every box, shape ``(boxes, T)``: no entry that it holds is larger in any component.
    box_of
        Per entry a box whose value is that of the entry, shape ``(S_0, ..., S_k)``.
    """

    sides: tuple[BoolArray, ...]
    values: IntArray
    box_of: IntArray


def cover(table: IntArray) -> BoxCover:
    """Cover a table with boxes, greedily.

    Parameters
    ----------
    table
        Values with ``T`` components, shape ``(S_0, ..., S_k, T)``.
    """
    shape, width = table.shape[:-1], table.shape[-1]
    values, level = np.unique(table.reshape(-1, width), axis=0, return_inverse=True)
    level = level.reshape(shape)
    box_of = np.full(shape, -1, dtype=np.int64)
    found: list[tuple[BoolArray, ...]] = []
    of_value: list[int] = []
    for value in range(len(values)):
        equal, below = level == value, None
        while (waiting := equal & (box_of < 0)).any():
            if below is None:
                below = (values <= values[value]).all(axis=1)[level]
            start = np.unravel_index(int(waiting.argmax()), shape)
            grown = [(sides, _inside(sides)) for sides in _grown(below, tuple(map(int, start)))]
            sides, inside = max(grown, key=lambda each: int((waiting & each[1]).sum()))
            box_of[waiting & inside] = len(found)
            found.append(sides)
            of_value.append(value)
    per_axis = tuple(np.array([sides[axis] for sides in found], dtype=np.bool_).T for axis in range(len(shape)))
    return BoxCover(per_axis, values[of_value], box_of)


def _grown(allowed: BoolArray, start: tuple[int, ...]) -> Iterator[tuple[BoolArray, ...]]:
    """Yield largest boxes of allowed entries around one of them, one for each order of the axes."""
    for order in itertools.permutations(range(allowed.ndim)):
        sides = [np.arange(size) == place for size, place in zip(allowed.shape, start, strict=True)]
        for axis in order:
            others = tuple(k for k in range(allowed.ndim) if k != axis)
            kept = [np.ones_like(side) if k == axis else side for k, side in enumerate(sides)]
            sides[axis] = allowed[np.ix_(*kept)].all(axis=others)
        yield tuple(sides)


def _inside(sides: tuple[BoolArray, ...]) -> BoolArray:
    inside = sides[0]
    for side in sides[1:]:
        inside = inside[..., None] & side
    return inside
