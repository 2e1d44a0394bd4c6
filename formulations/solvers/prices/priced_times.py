"""The times at which memory has a price: where a few price steps expect the limits to bind."""

from __future__ import annotations

import time

import numpy as np

from formulations.encodings.flat import flatten
from formulations.problem.strategy_problem import BoolArray, StrategyProblem
from formulations.solvers.prices.ascent import PriceAscent
from formulations.solvers.prices.tunables import FIRST_PAIRS

_STEPS = 8
"""Not tunable: price steps; after a few the rows with a price hardly change, and their prices are not needed."""


def priced_times(problem: StrategyProblem, deadline: float) -> tuple[int, ...]:
    """Return the times whose rows have a price in the second half of the steps, of all resources.

    Parameters
    ----------
    problem
        A validated problem.
    deadline
        Of :func:`time.monotonic`; steps end soon after it.
    """
    flat = flatten(problem)
    if flat.contradiction:
        return ()
    ascent = PriceAscent(flat)
    ascent.sweeps(FIRST_PAIRS)
    priced: BoolArray = np.zeros(len(flat.usage.limit), dtype=np.bool_)
    for k in range(_STEPS):
        ascent.step(k / _STEPS)
        if 2 * k >= _STEPS:
            priced |= ascent.prices > 0
        if time.monotonic() > deadline:
            break
    priced |= ascent.best_prices > 0
    return tuple(np.unique(flat.rows.time[priced]).tolist())
