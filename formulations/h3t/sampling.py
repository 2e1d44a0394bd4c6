"""H3T's searches by trying sequences: at random (Algorithm 1), spread evenly (Algorithm 2), and one set for all layers.

They use all 128 sets of switches, synchronization among them, and the simulator of whole steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from formulations.h3t.operations import ALL_ON, SETS
from formulations.h3t.problem import H3tError, H3tStep, Outcome, simulate_sequences
from formulations.h3t.slips import REPAIRED, Slip
from formulations.problem.strategy_problem import IntArray

__all__ = ["RANDOM_SEQUENCES", "H3tFound", "fastest_of", "search_greedy", "search_random", "search_uniform", "spread"]

RANDOM_SEQUENCES = 10_000
"""Sequences that the random search draws; the paper does not say how many."""

_BATCH = 1024


@dataclass(frozen=True, slots=True)
class H3tFound:
    """The plan of a search.

    Parameters
    ----------
    sequence
        Sets of switches, one per layer.
    outcome
        Its simulated cost and peak.
    """

    sequence: tuple[int, ...]
    outcome: Outcome


def search_random(step: H3tStep, seed: int = 0, count: int = RANDOM_SEQUENCES) -> H3tFound | None:
    """Keep the fastest of so many random sequences that fit (Algorithm 1); None where none fits."""
    rng = np.random.default_rng(seed)
    best: H3tFound | None = None
    for first in range(0, count, _BATCH):
        drawn = rng.integers(0, SETS, (min(_BATCH, count - first), len(step.layers)))
        best = _better(best, _fastest(step, drawn))
    return best


def search_greedy(step: H3tStep, slips: Slip = REPAIRED) -> H3tFound | None:
    """Start with all switches on and give any one set to n layers, for every n (Algorithm 2); None where none fits."""
    count = len(step.layers)
    best: H3tFound | None = None
    for flexible in range(1, count + 1):
        sequences = np.full((SETS, count), int(ALL_ON), dtype=np.int64)
        sequences[:, spread(count, flexible, slips)] = np.arange(SETS)[:, None]
        best = _better(best, _fastest(step, sequences))
    return best


def search_uniform(step: H3tStep) -> H3tFound | None:
    """Give all layers the same set, as one would by hand (section 4.1); None where none fits."""
    return _fastest(step, np.repeat(np.arange(SETS)[:, None], len(step.layers), axis=1))


def spread(count: int, flexible: int, slips: Slip = REPAIRED) -> IntArray:
    """Layers that Algorithm 2 gives another set of switches, the first being 0.

    Parameters
    ----------
    count
        Layers there are.
    flexible
        How many get it, at most all.
    slips
        What is kept as printed.
    """
    places: IntArray = np.arange(flexible)
    return places * (count // flexible) if Slip.GREEDY_SPACING in slips else places * count // flexible


def fastest_of(step: H3tStep, sequences: Sequence[Sequence[int]]) -> H3tFound | None:
    """Return the fastest of given sequences that fits; None where none does.

    Raises
    ------
    H3tError
        If a sequence has not one set of switches per layer.
    """
    count = len(step.layers)
    for sequence in sequences:
        if len(sequence) != count:
            raise H3tError(f"{len(sequence)} sets of switches for {count} layers; give one for each")
    return _fastest(step, np.array(sequences, dtype=np.int64).reshape(-1, count))


def _fastest(step: H3tStep, sequences: IntArray) -> H3tFound | None:
    """The fastest sequence that fits, the first of several."""
    found = simulate_sequences(step, sequences)
    fitting = np.flatnonzero(found[:, 1] <= step.memory_limit)
    if not len(fitting):
        return None
    best = int(fitting[found[fitting, 0].argmin()])
    return H3tFound(tuple(sequences[best].tolist()), Outcome(*found[best].tolist()))


def _better(best: H3tFound | None, other: H3tFound | None) -> H3tFound | None:
    if best is None or other is None:
        return other if best is None else best
    return other if other.outcome.cost < best.outcome.cost else best
