"""The multiple-choice knapsack: enumeration agrees, weights of zero and ties among them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from formulations.osdp.knapsack import Knapsack, KnapsackClass
from formulations.osdp.pareto import repeated, single, together, undominated


def random_classes(rng: np.random.Generator) -> list[KnapsackClass]:
    classes = []
    for _ in range(int(rng.integers(1, 4))):
        size = int(rng.integers(1, 5))
        weight = rng.choice([0, 0, 1, 3, 7, 1000, 1001], size)
        cost = rng.integers(0, 6, size) if rng.random() < 0.5 else rng.integers(0, 5000, size)
        allowed = rng.random(size) < 0.8
        allowed[int(rng.integers(size))] = True
        classes.append(KnapsackClass(weight, cost, allowed, int(rng.integers(1, 4))))
    return classes


def solutions(classes: list[KnapsackClass]) -> list[tuple[int, int]]:
    """Weight and cost of every choice that is allowed."""
    copies = [each for each in classes for _ in range(each.count)]
    choices = itertools.product(*(np.flatnonzero(each.allowed).tolist() for each in copies))
    return [
        (
            sum(int(each.weight[c]) for each, c in zip(copies, chosen, strict=True)),
            sum(int(each.cost[c]) for each, c in zip(copies, chosen, strict=True)),
        )
        for chosen in choices
    ]


@pytest.mark.parametrize("seed", range(80))
def test_enumeration_agrees_at_every_capacity(seed: int) -> None:
    classes = random_classes(np.random.default_rng(seed))
    everything = solutions(classes)
    knapsack = Knapsack(classes)
    lightest = min(weight for weight, _ in everything)
    assert knapsack.lightest == lightest
    assert knapsack.solve(lightest - 1) is None
    assert knapsack.bound(lightest - 1) is None
    for capacity in sorted({weight + extra for weight, _ in everything for extra in (0, 1)}):
        best = min((cost for weight, cost in everything if weight <= capacity), default=None)
        if best is None:
            continue
        found = knapsack.solve(capacity)
        assert found is not None
        assert (found.cost, found.bound) == (best, best)
        chosen = list(zip(classes, found.choices, strict=True))
        assert [len(each) for each in found.choices] == [each.count for each in classes]
        assert all(each.allowed[c] for each, copies in chosen for c in copies)
        assert sum(int(each.cost[c]) for each, copies in chosen for c in copies) == best
        assert sum(int(each.weight[c]) for each, copies in chosen for c in copies) <= capacity
        bound = knapsack.bound(capacity)
        assert bound is not None
        assert bound <= best
        assert knapsack.improve(capacity, best) is None
        improved = knapsack.improve(capacity, best + 1)
        assert improved is not None
        assert improved.cost == best


def test_of_equals_one_is_kept() -> None:
    weight, cost = np.array([5, 0, 5, 2, 0]), np.array([1, 4, 1, 4, 4])
    assert undominated(weight, cost).tolist() in ([1, 0], [1, 2], [4, 0], [4, 2])


def test_fronts_know_their_choices() -> None:
    front = single(np.array([4, 0, 1]), np.array([0, 9, 9]), np.array([True, True, True]))
    assert (front.weight.tolist(), front.cost.tolist()) == ([0, 4], [9, 0])
    thrice = repeated(front, 3)
    assert (thrice.weight.tolist(), thrice.cost.tolist()) == ([0, 4, 8, 12], [27, 18, 9, 0])
    assert sorted(thrice.choices(1)) == [0, 1, 1]
    both = together(thrice, front, lambda weight, cost: weight + cost < 30)
    assert both.weight.tolist() == [8, 12, 16]
