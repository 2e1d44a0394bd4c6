"""Elimination on graphs that have more nodes without a choice around one node than an array has axes."""

from __future__ import annotations

import numpy as np

from formulations.encodings.elimination import CostTable, minimise


def test_any_number_of_neighbours_without_a_choice() -> None:
    leaves = 200
    sizes = [3, *[1] * leaves, 2]
    rng = np.random.default_rng(0)
    pairs = [CostTable((0, k), rng.integers(0, 9, (3, 1))) for k in range(1, leaves + 1)]
    ring = [CostTable((k, k + 1), rng.integers(0, 9, (1, sizes[k + 1]))) for k in range(1, leaves + 1)]
    found = minimise(sizes, [*pairs, *ring])
    assert found is not None
    first = sum(table.cost[:, 0] for table in pairs)
    rest = sum(int(table.cost[0, 0]) for table in ring[:-1]) + int(ring[-1].cost.min())
    assert found[0] == int(first.min()) + rest
    assert found[1][0] == int(first.argmin())
