"""Bounds in 64-bit integers: what messages may carry without changing them."""

from __future__ import annotations

from itertools import product

import numpy as np
from support.problems.random_problems import random_problem

from formulations.encodings.flat import FlatProblem, FloatArray, flatten
from formulations.encodings.flat_restriction import narrow
from formulations.problem.solution import SolveOptions
from formulations.solvers.prices.ascent import PriceAscent
from formulations.solvers.prices.integer_bound import holds_exact_costs, integer_bound
from formulations.solvers.running.run import solve_in_process


def climbed(seed: int) -> PriceAscent | None:
    """A random problem of which some strategies are forbidden, after price steps; None where nothing remains."""
    flat = flatten(random_problem(seed))
    if flat.contradiction or not holds_exact_costs(flat) or not len(flat.graph.arity):
        return None
    allowed = np.random.default_rng(seed).random(len(flat.unary)) < 0.8
    restriction = narrow(flat, allowed)
    if restriction is None:
        return None
    ascent = PriceAscent(restriction.flat)
    for k in range(10):
        ascent.step(k / 10)
    return ascent


def shifted(flat: FlatProblem, messages: FloatArray, rng: np.random.Generator) -> FloatArray:
    """The same messages, each moved by some multiple of the penalty."""
    moved = messages.copy()
    graph = flat.graph
    for f, size in enumerate(graph.arity):
        for k in range(size):
            start, width = graph.message_start[f, k], graph.sizes[graph.scope[f, k]]
            moved[start : start + width] += flat.penalty * float(rng.integers(-2, 3)) / 4.0
    return moved


def test_constants_in_messages_change_no_bound() -> None:
    """Sweeps carry parts of the penalty round a cycle; they say nothing, and take nothing from the bound."""
    rng = np.random.default_rng(0)
    checked = 0
    for seed in range(300):
        ascent = climbed(seed)
        if ascent is None or ascent.best_bound > 1e-3 * ascent.flat.penalty:
            continue
        flat = ascent.flat
        before = integer_bound(flat, ascent.best_prices, ascent.best_messages)
        after = integer_bound(flat, ascent.best_prices, shifted(flat, ascent.best_messages, rng))
        if before is None or after is None or before.contradiction:
            continue
        # What a double of the size of the penalty rounds.
        spare = 2.0 + before.rounding + after.rounding + 1e-12 * flat.penalty * len(ascent.best_messages)
        assert abs(after.bound - before.bound) <= spare, seed
        checked += 1
    assert checked > 50


def test_no_messages_and_prices_give_more_than_an_optimum() -> None:
    rng = np.random.default_rng(1)
    checked = 0
    for seed, huge in product(range(150), (0.0, 1.0)):
        problem = random_problem(seed)
        flat = flatten(problem)
        if flat.contradiction or not holds_exact_costs(flat):
            continue
        best = solve_in_process(problem, "brute_force", SolveOptions(time_limit=10.0)).objective
        ascent = PriceAscent(flat)
        messages = ascent.messages + rng.normal(size=len(ascent.messages)) * (10.0 + huge * flat.penalty)
        proof = integer_bound(flat, rng.random(len(ascent.prices)) * 10.0, messages)
        if best is None or proof is None:
            continue
        assert not proof.contradiction, seed
        assert proof.bound <= best, seed
        checked += 1
    assert checked > 100
