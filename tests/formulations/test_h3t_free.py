"""H3T with synchronization as a free switch: the program against enumeration over all 128 sets."""

from __future__ import annotations

import numpy as np
import pytest
from support.h3t_steps import SYNC, enumerated, random_step

from formulations.models.h3t import simulate, simulate_sequences
from formulations.models.h3t_operations import SETS
from formulations.models.h3t_program import FreeProgram
from formulations.solution import SolveOptions
from formulations.solvers import SolverPool
from formulations.solvers.h3t import solve_free
from formulations.solvers.h3t_worker import step_as_text, step_of_text


@pytest.mark.parametrize(
    ("seeds", "layers"),
    [
        (range(8), 1),
        (range(12, 15), 2),
        pytest.param(range(300), 1, marks=pytest.mark.fuzz),
        pytest.param(range(300), 2, marks=pytest.mark.fuzz),
        pytest.param(range(6), 3, marks=pytest.mark.fuzz),
    ],
)
def test_best_sequences_with_free_synchronization(seeds, layers):
    with SolverPool() as pool:
        for seed in seeds:
            step = random_step(seed, most_layers=layers)
            cost, _ = enumerated(step, range(SETS))
            found = solve_free(step, options=SolveOptions(time_limit=60.0), pool=pool)
            if cost is None:
                assert found.sequence is None, seed
                continue
            assert found.outcome.cost == cost, seed
            assert found.bound is None or found.bound <= cost, seed
            assert found.is_optimal, seed


def test_steps_survive_as_text():
    for seed in range(20):
        step = random_step(seed)
        assert step_of_text(step_as_text(step)) == step


def test_what_is_forbidden_is_a_row():
    step = random_step(5, most_layers=3)
    program = FreeProgram(step, 10**6)
    before = program.program().rows
    program.forbid([SYNC] * len(step.layers), [127] * len(step.layers))
    assert program.program().rows == before + 1


def test_without_synchronization_streams_only_get_ahead():
    for seed in range(100):
        step = random_step(seed)
        sequences = np.random.default_rng(seed).integers(0, 64, (20, len(step.layers)))
        free, synchronized = simulate_sequences(step, sequences), simulate_sequences(step, sequences | SYNC)
        assert (free[:, 0] <= synchronized[:, 0]).all(), seed
        assert simulate(step, sequences[0]).cost == free[0, 0]
