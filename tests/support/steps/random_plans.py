"""Random decisions whose operators run again twice."""

from __future__ import annotations

import random
from dataclasses import replace

from formulations.step.kiwi_chain import chain_moments
from formulations.step.modes import Modes, needed_reruns, once_or_twice
from formulations.step.training_step import Moments, NodeKind, StepDecision, StepModel


def with_reruns_twice(model: StepModel, decision: StepDecision, seed: int) -> StepDecision:
    """The same layouts; operators run again once or twice, and reruns read any copy of those that may do so twice."""
    rng = random.Random(f"twice of {seed}")
    modes = once_or_twice(model, chain_moments(model))
    found: dict[int, Moments] = {}
    for i in sorted(modes, reverse=True):
        readers = {edge.consumer for edge in model.edges_from[i]}
        reads = [moment for v in readers for moment in found.get(v, ())]
        reads += [v for v in readers if model.nodes[v].kind is NodeKind.BACKWARD]
        any_copy = len(modes[i][-1]) > 1
        possible = [mode for mode in modes[i] if any_copy or mode[-1] <= min(reads, default=mode[-1])]
        twice = [mode for mode in possible if len(mode) > 1 and any(mode[0] <= read < mode[1] for read in reads)]
        if possible and rng.random() < 0.6:
            found[i] = rng.choice(twice if twice and rng.random() < 0.7 else possible)
    return replace(decision, recomputed=needed_reruns(model, found))


def modes_with(model: StepModel, decision: StepDecision) -> Modes:
    """Modes of a problem that a decision of :func:`with_reruns_twice` is in, and few others."""
    every = once_or_twice(model, chain_moments(model))
    return {i: (mode, *every[i][-1:]) if len(every[i][-1]) > 1 else (mode,) for i, mode in decision.recomputed.items()}
