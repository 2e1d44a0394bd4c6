"""The canonical problem of a synchronized H3T step: the same costs and peaks as the simulator, for every sequence."""

from __future__ import annotations

import numpy as np
from support.problems.h3t_steps import SYNC, random_step

from formulations.h3t.canonical import h3t_problem
from formulations.h3t.problem import simulate_sequences
from formulations.h3t.segments import handed_over, lazy, segment_tables
from formulations.problem.checker import check


def test_costs_and_peaks_are_the_simulators():
    for seed in range(40):
        step = random_step(seed, most_layers=6)
        problem = h3t_problem(segment_tables(step), step.memory_limit)
        problem.validate()
        sequences = np.random.default_rng(seed).integers(0, 64, (10, len(step.layers)))
        whole = simulate_sequences(step, sequences | SYNC)
        for sequence, (cost, peak) in zip(sequences, whole.tolist(), strict=True):
            report = check(problem, tuple(sequence.tolist()))
            assert (report.objective, report.peaks[0].usage) == (cost, peak), seed


def test_the_papers_windows_of_three_layers_say_the_same():
    for seed in range(40):
        step = random_step(seed, most_layers=6)
        tables = segment_tables(step)
        windows = tables.by_layer()
        sequence = np.random.default_rng(seed).integers(0, 64, len(step.layers))
        cost, held, peak = tables.fixed_cost, 0, 0
        for i, own in enumerate(sequence):
            below = int(handed_over(sequence[i - 1])) if i else 0
            above = int(lazy(sequence[i + 1])) if i + 1 < len(sequence) else 0
            cost += windows.time[i, below, own, above]
            peak = max(peak, held + windows.peak[i, below, own, above]) + windows.resident[i, own]
            held += windows.resident[i, own] + windows.kept[i, own]
        outcome = tables.outcome(sequence)
        assert (cost, tables.fixed_bytes + peak) == (outcome.cost, outcome.peak), seed
