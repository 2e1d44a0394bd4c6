"""An order of a small graph's nodes that depends on what they are, not on how they are numbered.

Colour refinement: nodes of equal content have one colour; colours are split by the tables and colours around
each node until nothing splits. Where colours are still shared, one node gets a colour of its own and refinement
goes on (individualisation; McKay and Piperno: Practical graph isomorphism II, 2014). Only one node is tried: where
the nodes of a colour are not images of each other under a symmetry, equal graphs may get different orders. So
to compare graphs, compare all of their content in this order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

View = tuple[bytes, tuple[int, ...]]
"""A table seen from one of its nodes: its content with that node's axis first, and the others as its axes go on."""


def canonical_order(content: Sequence[bytes], views: Sequence[Sequence[View]]) -> list[int]:
    """Return the nodes in an order that a renumbering of the graph does not change, symmetries aside.

    Parameters
    ----------
    content
        Per node what it is by itself.
    views
        Per node its tables as seen from it, in each order of the other axes.

    Returns
    -------
    list of int
        All nodes; in graphs that differ by their numbering, nodes at one place correspond to each other,
        wherever refinement tells apart all nodes that no symmetry exchanges.
    """
    colours = _refined(_ranks(content), views)
    while len(set(colours)) < len(colours):
        ordered = sorted(colours)
        tied = next(colour for colour, following in itertools.pairwise(ordered) if colour == following)
        chosen = colours.index(tied)
        colours = _refined(_ranks([(colour, k != chosen) for k, colour in enumerate(colours)]), views)
    return sorted(range(len(colours)), key=colours.__getitem__)


def _refined(colours: list[int], views: Sequence[Sequence[View]]) -> list[int]:
    """Split colours by what is seen around each node, until nothing splits."""
    while True:
        around = [sorted((table, [colours[k] for k in others]) for table, others in own) for own in views]
        finer = _ranks(list(zip(colours, around, strict=True)))
        if max(finer, default=0) == max(colours, default=0):
            return finer
        colours = finer


def _ranks(keys: Sequence[Any]) -> list[int]:
    """Number the keys by their order, equal ones alike."""
    place: list[int] = [0] * len(keys)
    rank, before = -1, None
    for k in sorted(range(len(keys)), key=keys.__getitem__):
        if rank < 0 or keys[k] != before:
            rank, before = rank + 1, keys[k]
        place[k] = rank
    return place
