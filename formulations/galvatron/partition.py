"""Partitions of layers into pipeline stages that balance a load (section IV-B).

Time-balanced partitions use the time of every layer, memory-balanced ones its memory at each position of the pipeline:
under 1F1B earlier stages hold the activations of more micro-batches, so they get fewer layers.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from formulations.galvatron.best_partition import best_partition

__all__ = ["balanced_partition"]


def balanced_partition(loads: NDArray[np.float64]) -> tuple[int, ...]:
    """Cut a chain so that the largest stage is least, and among these cuts the sum of squares of the stages.

    Parameters
    ----------
    loads
        Load of every layer at every position, shape ``(P, L)``, not negative.

    Returns
    -------
    tuple of int
        ``P + 1`` borders; every stage has a layer.

    Raises
    ------
    ValueError
        If there are more stages than layers.
    """
    stages, layers = loads.shape
    if not 1 <= stages <= layers:
        raise ValueError(f"{stages} stages for {layers} layers; every stage needs a layer, so use at most {layers}")
    sums = np.concatenate([np.zeros((stages, 1)), np.cumsum(loads, axis=1)], axis=1)
    segments = sums[:, None, :] - sums[:, :, None]
    segments[:, np.tril(np.ones((layers + 1, layers + 1), dtype=np.bool_))] = np.inf
    smallest, _ = best_partition(segments, np.maximum)
    largest = smallest * (1 + 1e-9)
    _, borders = best_partition(np.where(segments <= largest, segments**2, np.inf))
    return borders


def moved_layer(borders: tuple[int, ...], stage: int, forward: bool) -> tuple[int, ...] | None:
    """Move a boundary layer out of a stage, to the next one or to the one before.

    Parameters
    ----------
    borders
        ``P + 1`` borders.
    stage
        The stage that loses a layer.
    forward
        Whether its last layer goes to the next stage; if not, its first goes to the one before.

    Returns
    -------
    tuple of int or None
        The new borders; None where there is no such neighbour or the stage has one layer.
    """
    border = stage + 1 if forward else stage
    if border in (0, len(borders) - 1):
        return None
    moved = list(borders)
    moved[border] += -1 if forward else 1
    return tuple(moved) if all(first < end for first, end in pairwise(moved)) else None
