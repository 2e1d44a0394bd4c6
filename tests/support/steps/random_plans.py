"""Random decisions over a strategy space: any layouts that can be joined, any recomputation."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np

from formulations.step.kiwi_chain import chain_moments, latest_moments
from formulations.step.modes import Modes, needed_reruns, once_or_twice
from formulations.step.training_step import Moments, NodeKind, StepDecision, StepModel
from planner.strategies.space import StrategySpace


def random_decision(space: StrategySpace, seed: int, recompute_share: float = 0.5, chains: bool = True) -> StepDecision:
    """Draw layouts node by node among those that every earlier producer can reach, then operators to recompute."""
    rng = random.Random(seed)
    model = space.model
    blocks: list[list[tuple[int, np.ndarray]]] = [[] for _ in model.nodes]
    for edge in model.edges:
        blocks[edge.consumer].append((edge.producer, edge.forbidden))
    for gradient in model.gradients:
        blocks[gradient.producer].append((gradient.parameter, gradient.forbidden.T))
    layouts: list[int] = []
    for i, node in enumerate(model.nodes):
        allowed = np.ones(node.size, dtype=bool)
        for earlier, forbidden in blocks[i]:
            allowed &= ~forbidden[layouts[earlier]]
        for result in model.results:
            if result.producer == i:
                allowed &= ~result.forbidden
        choices = np.flatnonzero(allowed)
        assert choices.size, f"{node.name} has no layout that its inputs can reach"
        layouts.append(int(rng.choice(choices.tolist())))
    return StepDecision(tuple(layouts), random_recomputation(model, rng, recompute_share, chains))


def random_recomputation(model: StepModel, rng: random.Random, share: float, chains: bool = True) -> dict[int, Moments]:
    """Draw operators to run again, and moments; without chains none of their inputs is recomputed."""
    chosen: set[int] = set()
    inputs: list[set[int]] = [set() for _ in model.nodes]
    for edge in model.edges:
        inputs[edge.consumer].add(edge.producer)
    moments = chain_moments(model)
    for i in sorted(moments):
        wanted = chains or (model.first_backward_use[i] >= 0 and not inputs[i] & chosen)
        if rng.random() < share and wanted:
            chosen.add(i)
    found = latest_moments(model, {i: rng.choice((None, *moments[i])) if chains else None for i in chosen})
    return {i: (moment,) for i, moment in found.items()}


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
