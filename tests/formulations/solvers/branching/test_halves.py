"""How a node of a branch is split in two."""

from __future__ import annotations

import numpy as np
import pytest

from formulations.solvers.branching.halves import Mixture


def mixture(weights: list[list[float]], usages: list[list[float]]) -> Mixture:
    offset = np.cumsum([0] + [len(own) for own in weights])
    return Mixture(offset, np.ones(offset[-1], dtype=np.bool_), np.concatenate(weights), np.concatenate(usages))


def halves(mixed: Mixture, node: int) -> list[list[int]]:
    """The strategies of a node on either side; those of all others are on both."""
    found = mixed.halves(node)
    first, end = mixed.offset[node], mixed.offset[node + 1]
    for half in found:
        assert (half[:first] == mixed.allowed[:first]).all()
        assert (half[end:] == mixed.allowed[end:]).all()
    return [np.flatnonzero(half[first:end]).tolist() for half in found]


def test_usage_is_split_at_its_mean() -> None:
    mixed = mixture([[0.5, 0.5, 0.0, 0.0, 0.0]], [[0.0, 100.0, 0.0, 40.0, 60.0]])
    assert halves(mixed, 0) == [[0, 2, 3], [1, 4]]


def test_equal_usage_is_split_by_weight() -> None:
    assert halves(mixture([[0.1, 0.4, 0.2, 0.3]], [[5.0] * 4]), 0) == [[1, 3], [0, 2]]
    assert halves(mixture([[1.0] * 4], [[0.0] * 4]), 0) == [[0, 1], [2, 3]]


def test_what_is_not_allowed_is_on_neither_side() -> None:
    mixed = mixture([[0.5, 0.5, 0.0, 0.0]], [[0.0, 100.0, 0.0, 100.0]])
    mixed.allowed[2:] = False
    assert halves(mixed, 0) == [[0], [1]]


def test_only_nodes_that_are_mixed_spread() -> None:
    mixed = mixture([[0.5, 0.5], [0.5, 0.5], [1.0, 0.0], [1.0]], [[0.0, 6.0], [3.0, 3.0], [0.0, 9.0], [1.0]])
    assert mixed.undecided().tolist() == [True, True, False, False]
    assert mixed.spread() == pytest.approx([3.0, 0.0, 0.0, 0.0])


def test_rounding_errors_are_no_spread() -> None:
    mixed = mixture([[0.3, 0.7], [0.3, 0.7]], [[5.3, 5.3 + 1e-9], [5.3, 5.4]])
    assert (mixed.spread() > 0.0).tolist() == [False, True]
    assert halves(mixed, 0) == [[1], [0]]


def test_both_sides_have_strategies_whatever_the_weights_are() -> None:
    assert halves(mixture([[0.0, 0.0, 0.0]], [[0.0, 1.0, 2.0]]), 0) == [[0], [1, 2]]
    assert halves(mixture([[1.0, 0.0]], [[7.0, 0.0]]), 0) == [[0], [1]]


def test_neither_side_holds_the_mixture() -> None:
    random = np.random.default_rng(0)
    for _ in range(500):
        size = int(random.integers(2, 7))
        weight = random.dirichlet(np.full(size, 0.5))
        weight[weight < 0.1] = 0.0
        if np.count_nonzero(weight) < 2:
            continue
        mixed = mixture([weight.tolist()], [random.integers(0, 3, size).astype(float).tolist()])
        below, above = mixed.halves(0)
        assert not (below & above).any()
        assert (below | above).all()
        assert weight[below].any()
        assert weight[above].any()
