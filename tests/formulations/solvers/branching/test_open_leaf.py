"""Branches at prices: exact bounds are those of the prices, and a climb keeps what its branch has."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support.problems.random_problems import random_problem

from formulations.encodings.flat import flatten
from formulations.encodings.flat_restriction import narrow
from formulations.solvers.branching.open_leaf import OpenLeaf, reopened
from formulations.solvers.prices.ascent import PriceAscent
from formulations.solvers.prices.integer_bound import holds_exact_costs

STEPS = 4


def open_leaf(seed: int) -> OpenLeaf | None:
    """The whole of a random problem as a branch, after price steps; None where it has no limit or no assignment."""
    flat = flatten(random_problem(seed))
    if flat.contradiction or not holds_exact_costs(flat) or not len(flat.usage.limit):
        return None
    ascent = PriceAscent(flat)
    for k in range(10):
        ascent.step(k / 10)
    restriction = narrow(flat, np.ones(len(flat.unary), dtype=np.bool_))
    assert restriction is not None
    leaf = OpenLeaf(flat, restriction, -(10**18), (ascent.best_prices, ascent.best_messages[restriction.messages]))
    leaf.sweep(1)
    return leaf


def halved(leaf: OpenLeaf, rng: np.random.Generator) -> OpenLeaf | None:
    """The branch with some of a node's strategies; None where a node then has none."""
    allowed, offset = leaf.kept(), leaf.root.graph.offset
    node = int(rng.integers(len(offset) - 1))
    places = offset[node] + np.flatnonzero(allowed[offset[node] : offset[node + 1]])
    allowed[rng.permutation(places)[: len(places) // 2]] = False
    return leaf.narrowed(allowed)


@pytest.mark.parametrize("batch", range(4))
def test_exact_bounds_of_branches_are_those_of_the_prices(batch) -> None:
    """Also where strategies lose their support, so that messages would carry the penalty."""
    rng = np.random.default_rng(batch)
    checked = 0
    for seed in range(100 * batch, 100 * batch + 100):
        leaf = open_leaf(seed)
        for _ in range(4):
            if leaf is None or leaf.closed:
                break
            leaf.climb(STEPS, math.inf)
            floating, penalty = leaf.ascent.best_bound, leaf.flat.penalty
            if leaf.proof is None or floating > 1e-3 * penalty:
                break
            spare = 1.0 + leaf.proof.rounding + 1e-9 * abs(floating)
            assert leaf.proof.bound >= floating - spare, seed
            checked += 1
            leaf = halved(leaf, rng)
    assert checked > 50


def test_a_climb_keeps_the_prices_that_its_branch_has() -> None:
    kept = 0
    for seed in range(300):
        leaf = open_leaf(seed)
        if leaf is None or leaf.closed or leaf.ascent.best_bound > 1e-3 * leaf.flat.penalty:
            continue
        before = leaf.ascent.best_bound
        again = reopened(leaf.root, leaf.stored(False))
        again.climb(STEPS, math.inf)
        rounding = 1e-6 * (abs(before) + float(np.abs(leaf.ascent.best_messages).sum()))
        assert again.ascent.best_bound >= before - rounding, seed
        kept += 1
    assert kept > 50


def test_a_climb_ends_at_enough_and_proves_it() -> None:
    """Also in branches where nothing fits, whose prices grow without end."""
    rng = np.random.default_rng(5)
    proven = 0
    for seed in range(600):
        leaf = open_leaf(seed)
        for _ in range(3):
            if leaf is None or leaf.closed or leaf.ascent.best_bound > 1e-3 * leaf.flat.penalty:
                break
            enough = leaf.bound + abs(leaf.bound) // 20 + 1
            leaf.climb(8 * STEPS, math.inf, enough)
            if leaf.proof is not None and leaf.ascent.best_bound > enough + 1.0 + leaf.proof.rounding:
                assert leaf.closed or leaf.bound >= enough, seed
                assert leaf.ascent.iterations < 8 * STEPS, seed
                proven += 1
            leaf = halved(leaf, rng)
    assert proven > 50
