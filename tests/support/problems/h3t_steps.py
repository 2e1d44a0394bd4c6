"""Small random steps of H3T, and their best sequences by enumeration."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from formulations.h3t.operations import Switch
from formulations.h3t.problem import H3tBorders, H3tLayer, H3tStep, Optimizer, simulate_sequences

SYNC = int(Switch.SEGMENT_SYNC)
SCALES = (1, 1, 1_000_003)

_TOGETHER = 2**18
"""Sequences that are simulated in one call."""


def random_step(seed, most_layers=5, memory_limit=None):
    """A step whose layers are often alike, with zero bytes, zero communication and ties.

    Without a limit it is one that binds: often exactly what some sequence needs, at times less than any needs.
    """
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, most_layers + 1))
    scale = int(rng.choice(SCALES))
    zeros = rng.random() < 0.4

    def number(high, least=0):
        if zeros and least == 0 and rng.random() < 0.4:
            return 0
        return int(rng.integers(least, high)) * scale

    kinds = [
        H3tLayer(
            parameter_bytes=number(9),
            shard_bytes=number(4),
            hidden_bytes=number(6),
            activation_bytes=number(15),
            forward_bytes=number(4),
            backward_bytes=number(4),
            forward=number(9, 1),
            backward=number(15, 1),
            gather=number(9),
            scatter=number(9),
            hidden_copy=number(9),
            shard_copy=number(5),
            update=number(9),
        )
        for _ in range(int(rng.integers(1, count + 1)))
    ]
    borders = H3tBorders(
        fixed_bytes=number(5),
        output_bytes=number(6),
        embedding_bytes=number(20),
        loss_bytes=number(20),
        embedding_forward=number(5),
        embedding_backward=number(5),
        loss=number(8),
    )
    step = H3tStep(
        layers=tuple(kinds[int(k)] for k in rng.integers(0, len(kinds), count)),
        borders=borders,
        device_link=bool(rng.random() < 0.5),
        memory_limit=2**62 if memory_limit is None else memory_limit,
        optimizer=list(Optimizer)[int(rng.integers(0, 3))],
    )
    if memory_limit is not None:
        return step
    peaks = np.sort(simulate_sequences(step, rng.integers(0, 64, (50, count)) | SYNC)[:, 1])
    limit = int(peaks[int(rng.integers(0, 25))]) - int(rng.random() < 0.3)
    return replace(step, memory_limit=max(0, limit))


def enumerated(step, sets):
    """Least cost within the limit by trying every sequence of these sets, and the smallest peak of all."""
    sets, count = np.array(sets), len(step.layers)
    cost, least = None, 2**62
    for first in range(0, len(sets) ** count, _TOGETHER):
        numbers = np.arange(first, min(first + _TOGETHER, len(sets) ** count))
        found = simulate_sequences(step, sets[np.stack(np.unravel_index(numbers, (len(sets),) * count), axis=1)])
        fitting = found[found[:, 1] <= step.memory_limit, 0]
        if len(fitting):
            cost = int(fitting.min()) if cost is None else min(cost, int(fitting.min()))
        least = min(least, int(found[:, 1].min()))
    return cost, least
