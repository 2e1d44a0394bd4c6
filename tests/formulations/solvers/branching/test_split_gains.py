"""What splits have gained decides between nodes whose usage spreads alike."""

from __future__ import annotations

import numpy as np
import pytest

from formulations.solvers.branching.split_gains import Split, SplitGains


def _recorded(*gains: tuple[int, int, int]) -> SplitGains:
    """Gains of (node, side, gain), each for a split of spread 10 below a bound of 100."""
    found = SplitGains(3)
    for node, side, gain in gains:
        found.record(Split(node, 10.0, 100, side), 100 + gain)
    return found


def test_spread_alone_counts_while_nothing_was_gained() -> None:
    spread = np.array([1.0, 3.0, 2.0])
    assert SplitGains(3).promised(spread).tolist() == spread.tolist()
    assert _recorded((0, 0, 0), (0, 1, -5)).promised(spread).tolist() == spread.tolist()


def test_a_node_whose_parts_both_gain_comes_before_one_that_gains_on_one_side() -> None:
    gains = _recorded((0, 0, 8), (0, 1, 8), (1, 0, 0), (1, 1, 16))
    promised = gains.promised(np.full(3, 10.0))
    assert promised[1] < promised[0]
    assert promised[1] < promised[2]


def test_a_node_without_splits_counts_as_an_average_one() -> None:
    gains = _recorded((0, 0, 2), (0, 1, 2), (1, 0, 6), (1, 1, 6))
    first, second, unknown = gains.promised(np.full(3, 10.0))
    assert first < unknown < second
    assert unknown == 4.0


def test_the_most_promising_few_of_those_that_spread_are_tried() -> None:
    gains = SplitGains(8)
    spread = np.array([0.0, 3.0, 1.0, 0.0, 2.0, 5.0, 4.0, 6.0])
    assert [found.node for found in gains.candidates(spread)] == [7, 5, 6, 1]
    for side in (0, 1):
        gains.record(Split(7, 6.0, 100, side), 100)
        gains.record(Split(2, 1.0, 100, side), 130)
    assert [found.node for found in gains.candidates(spread)] == [5, 6, 1, 2]
    assert not list(gains.candidates(np.zeros(8)))


def test_scaled_costs_choose_the_same_node() -> None:
    random = np.random.default_rng(0)
    for _ in range(200):
        parts = [(int(random.integers(3)), int(random.integers(2)), int(random.integers(50))) for _ in range(8)]
        spread = random.random(3)
        found, scaled = SplitGains(3), SplitGains(3)
        for node, side, gain in parts:
            found.record(Split(node, 2.0, 100, side), 100 + gain)
            scaled.record(Split(node, 2000.0, 100_000, side), 100_000 + 1000 * gain)
        assert 1000 * found.promised(spread) == pytest.approx(scaled.promised(1000 * spread))
