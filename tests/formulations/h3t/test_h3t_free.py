"""H3T with synchronization as a free switch: the event model and the program against enumeration over all 128 sets."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest
from support.problems.h3t_steps import SYNC, enumerated, random_step

from formulations.h3t.free import descend, solve_free
from formulations.h3t.operations import SETS
from formulations.h3t.problem import H3tError, simulate, simulate_sequences
from formulations.h3t.program import memory_floor
from formulations.h3t.sampling import H3tFound
from formulations.problem.solution import SolveOptions, Status
from formulations.solvers import SolverPool


@pytest.mark.parametrize(
    ("seeds", "layers"),
    [
        (range(8), 1),
        (range(12, 22), 2),
        pytest.param(range(300), 1, marks=pytest.mark.fuzz),
        pytest.param(range(300), 2, marks=pytest.mark.fuzz),
        pytest.param(range(20), 3, marks=pytest.mark.fuzz),
    ],
)
def test_best_sequences_with_free_synchronization(seeds, layers):
    with SolverPool() as pool:
        for seed in seeds:
            step = random_step(seed, most_layers=layers)
            cost, _ = enumerated(step, range(SETS))
            found = solve_free(step, options=SolveOptions(time_limit=60.0), pool=pool)
            if cost is None:
                assert (found.status, found.sequence, found.bound) == (Status.INFEASIBLE, None, None), seed
                continue
            assert found.outcome.cost == cost, seed
            assert found.bound <= cost, seed
            assert found.status is Status.OPTIMAL, seed


@pytest.mark.fuzz
@pytest.mark.parametrize("layers", [4, 6])
def test_no_sequence_of_more_layers_is_below_the_bound(layers):
    """Too many to enumerate: a hundred thousand at random, and what descent makes of the best of them."""
    steps = [step for seed in range(60) if len((step := random_step(seed, most_layers=layers)).layers) == layers][:8]
    assert len(steps) == 8
    optimal = 0
    with SolverPool() as pool:
        for step in steps:
            found = solve_free(step, options=SolveOptions(time_limit=20.0), pool=pool)
            sequences = np.random.default_rng(0).integers(0, SETS, (100_000, layers))
            costs, peaks = simulate_sequences(step, sequences).T
            fitting = np.flatnonzero(peaks <= step.memory_limit)
            if not len(fitting):
                continue
            assert found.status not in (Status.INFEASIBLE, Status.INFEASIBLE_UNCONFIRMED)
            for row in fitting[np.argsort(costs[fitting])[:20]]:
                sampled = H3tFound(tuple(sequences[row].tolist()), simulate(step, sequences[row]))
                best = descend(step, sampled, time.monotonic() + 20.0)
                assert found.bound is None or found.bound <= best.outcome.cost
                assert found.status is not Status.OPTIMAL or found.outcome.cost <= best.outcome.cost
            optimal += found.status is Status.OPTIMAL
    assert optimal >= 6


@pytest.mark.slow
def test_below_the_least_memory_two_solvers_agree_that_nothing_fits():
    """Between the floor and the least that any sequence needs HiGHS and CP-SAT have to exclude all of them."""
    searched = 0
    with SolverPool() as pool:
        for seed in range(40):
            step = random_step(seed, most_layers=1)
            _, least = enumerated(step, range(SETS))
            assert memory_floor(step) <= least
            if memory_floor(step) < least:
                found = solve_free(replace(step, memory_limit=least - 1), pool=pool)
                assert found.status is Status.INFEASIBLE, (seed, found.message)
                assert "CP-SAT" in found.message
                searched += 1
                if searched == 2:
                    break
    assert searched == 2


@pytest.mark.parametrize("seeds", [range(40), pytest.param(range(40, 500), marks=pytest.mark.fuzz)])
def test_nothing_needs_less_than_the_floor(seeds):
    for seed in seeds:
        step = random_step(seed)
        sequences = np.random.default_rng(seed).integers(0, SETS, (200, len(step.layers)))
        assert simulate_sequences(step, sequences)[:, 1].min() >= memory_floor(step), seed
        below = replace(step, memory_limit=max(0, memory_floor(step) - 1))
        if below.memory_limit < memory_floor(step):
            assert solve_free(below).status is Status.INFEASIBLE


def test_a_start_of_another_length_is_refused():
    with pytest.raises(H3tError, match="2 sets of switches for 1 layers; give one for each"):
        solve_free(random_step(0, most_layers=1, memory_limit=2**40), [(1, 2)])


@pytest.mark.parametrize("seeds", [range(12, 18), pytest.param(range(100), marks=pytest.mark.fuzz)])
def test_the_relaxed_program_bounds_every_sequence(seeds):
    """The way of longer steps, where enumeration is possible."""
    optimal = 0
    with SolverPool() as pool:
        for seed in seeds:
            step = random_step(seed, most_layers=2)
            cost, _ = enumerated(step, range(SETS))
            found = solve_free(step, options=SolveOptions(time_limit=10.0), pool=pool, model_layers=0)
            assert found.bound is None or cost is None or found.bound <= cost, seed
            assert found.status is not Status.INFEASIBLE or cost is None, seed
            if found.outcome is not None:
                assert found.outcome.cost >= cost, seed
                assert found.status is not Status.OPTIMAL or found.outcome.cost == cost, seed
            optimal += found.status is Status.OPTIMAL
    assert optimal >= len(seeds) // 4


def test_without_synchronization_streams_only_get_ahead():
    for seed in range(100):
        step = random_step(seed)
        sequences = np.random.default_rng(seed).integers(0, 64, (20, len(step.layers)))
        free, synchronized = simulate_sequences(step, sequences), simulate_sequences(step, sequences | SYNC)
        assert (free[:, 0] <= synchronized[:, 0]).all(), seed
        assert simulate(step, sequences[0]).cost == free[0, 0]
