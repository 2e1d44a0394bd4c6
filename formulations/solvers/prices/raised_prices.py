"""The fullest rows of memory, and rises of prices where an assignment exceeds limits."""

from __future__ import annotations

import numpy as np

from formulations.encodings.flat import FloatArray
from formulations.problem.strategy_problem import IntArray
from formulations.solvers.prices.tunables import ROWS


def block_peaks(load: FloatArray) -> IntArray:
    """Return the row of the largest load in each of a few hundred blocks of rows, ascending."""
    count = len(load)
    if not count:
        return np.zeros(0, dtype=np.int64)
    length = max(1, count // ROWS)
    padded = np.full(-(-count // length) * length, -np.inf)
    padded[:count] = load
    blocks = padded.reshape(-1, length)
    peaks: IntArray = blocks.argmax(axis=1) + np.arange(len(blocks)) * length
    return peaks


def raised_prices(prices: FloatArray, usage: FloatArray, limit: FloatArray, mass: float) -> FloatArray:
    """Raise prices at the fullest row of every block over its limit.

    ``mass`` is the sum of price times limit to add in all, in equal parts.
    """
    scale = np.maximum(limit, 1.0)
    excess = (usage - limit) / scale
    peaks = block_peaks(excess)
    over = peaks[excess[peaks] > 0]
    result = prices.copy()
    if len(over):
        result[over] += mass / max(5, len(over)) / scale[over]
    return result
