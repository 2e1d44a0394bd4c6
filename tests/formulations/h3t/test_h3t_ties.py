"""Ranges of switches over all fastest plans, against enumeration."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from support.problems.h3t_steps import SYNC, random_step

from formulations.h3t.operations import Switch
from formulations.h3t.problem import H3tError, simulate_sequences
from formulations.h3t.segments import segment_tables
from formulations.h3t.ties import layers_with


def test_ranges_are_those_of_all_fastest_plans():
    wide = 0
    for seed in range(15):
        step = random_step(seed, most_layers=2)
        tables = segment_tables(step)
        sequences = np.array(list(product(range(SYNC, 2 * SYNC), repeat=len(step.layers))), dtype=np.int64)
        found = simulate_sequences(step, sequences)
        fitting = found[:, 1] <= step.memory_limit
        for switch in (Switch.REMAT, Switch.PARTITION):
            if not fitting.any():
                with pytest.raises(H3tError, match="are not known"):
                    layers_with(switch, tables, step.memory_limit)
                continue
            fastest = sequences[fitting & (found[:, 0] == found[fitting, 0].min())]
            counts = (fastest & int(switch) > 0).sum(axis=1)
            assert layers_with(switch, tables, step.memory_limit) == (counts.min(), counts.max()), (seed, switch)
            wide += counts.min() < counts.max()
    assert wide
