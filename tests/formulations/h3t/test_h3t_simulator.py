"""H3T's event simulator: a synchronized step is the sum and the maximum of its segments, to the integer."""

import numpy as np
import pytest
from support.problems.h3t_steps import SYNC, random_step

from formulations.h3t.problem import simulate_sequences
from formulations.h3t.segments import segment_tables


@pytest.mark.parametrize("seeds", [range(100), pytest.param(range(100, 5000), marks=pytest.mark.fuzz)])
def test_synchronized_steps_are_sums_of_their_segments(seeds):
    for seed in seeds:
        step = random_step(seed, most_layers=7)
        tables = segment_tables(step)
        sequences = np.random.default_rng(seed).integers(0, 64, (10, len(step.layers)))
        whole = simulate_sequences(step, sequences | SYNC)
        for sequence, (cost, peak) in zip(sequences, whole.tolist(), strict=True):
            outcome = tables.outcome(sequence)
            assert (outcome.cost, outcome.peak) == (cost, peak), seed
