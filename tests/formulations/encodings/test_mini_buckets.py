"""Bounds by mini-buckets: never above the least sum, equal to it where tables suffice, and none only where none is."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from formulations.encodings.elimination import CostTable, OutOfTimeError, minimise
from formulations.encodings.mini_buckets import least_sum_bound


def random_tables(seed: int) -> tuple[list[int], list[CostTable]]:
    """Tables over few nodes: ties, negative costs, forbidden entries, huge costs, several with one scope."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 4, rng.integers(1, 7)).tolist()
    largest = int(rng.choice([2, 50, 10**9, 2**58]))
    tables = []
    for _ in range(rng.integers(1, 10)):
        scope = tuple(rng.permutation(len(sizes))[: rng.integers(1, 4)].tolist())
        shape = [sizes[i] for i in scope]
        forbidden = rng.random(shape) < 0.2 if rng.random() < 0.5 else None
        tables.append(CostTable(scope, rng.integers(-largest, largest, shape), forbidden))
    return sizes, tables


def least_sum(sizes: list[int], tables: list[CostTable]) -> int | None:
    """By enumeration, in Python's integers."""
    sums = []
    for choices in itertools.product(*map(range, sizes)):
        at = [tuple(choices[i] for i in table.scope) for table in tables]
        if not any(t.forbidden is not None and t.forbidden[k] for t, k in zip(tables, at, strict=True)):
            sums.append(sum(int(t.cost[k]) for t, k in zip(tables, at, strict=True)))
    return min(sums, default=None)


@pytest.mark.parametrize("most_entries", [1, 8, 1 << 20])
@pytest.mark.parametrize("part", range(5))
def test_bounds_beside_enumeration(part, most_entries):
    closed = 0
    for seed in range(200 * part, 200 * (part + 1)):
        sizes, tables = random_tables(seed)
        bound, truth = least_sum_bound(sizes, list(tables), most_entries), least_sum(sizes, tables)
        if most_entries > 8:
            assert bound == truth, seed
        if truth is not None:
            assert bound is not None, seed
            assert bound <= truth, seed
            closed += bound == truth
    assert closed > 0


def test_larger_tables_close_a_loop():
    """A loop of three nodes that want to differ, of two strategies each: some pair does not."""
    same = np.eye(2, dtype=np.int64)
    tables = [CostTable(scope, same) for scope in ((0, 1), (1, 2), (0, 2))]
    assert minimise([2, 2, 2], tables) is not None
    assert least_sum_bound([2, 2, 2], list(tables), 4) == 0
    assert least_sum_bound([2, 2, 2], list(tables), 8) == 1


def test_the_deadline_is_kept():
    with pytest.raises(OutOfTimeError, match="1 of 1 nodes are left"):
        least_sum_bound([2], [CostTable((0,), np.zeros(2, dtype=np.int64))], 8, deadline=0.0)
