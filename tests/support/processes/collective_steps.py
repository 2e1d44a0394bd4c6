"""Single collectives between all placements of a tensor, and what a rank holds under each."""

from __future__ import annotations

import itertools

import torch

from planner.graph.placement import divides, is_partial, is_shard
from planner.machine.resharding import reductions_commute, step_between
from runtime.measure.local_shards import local_block

SHAPE = (8, 8, 12)
WORDS = ("R", "S0", "S1", "S2", "Psum", "Pavg", "Pmax", "Pmin")


def partial_terms(full, word, count):
    """Terms, one per position, whose reduction is ``full``."""
    generator = torch.Generator().manual_seed(7)
    if word in ("Psum", "Pavg"):
        noise = torch.rand((count, *full.shape), generator=generator)
        terms = full + noise - noise.mean(0)
        return terms / count if word == "Psum" else terms
    noise = torch.rand((count, *full.shape), generator=generator)
    holder = torch.randint(0, count, full.shape, generator=generator)
    noise.scatter_(0, holder.unsqueeze(0), 0.0)
    return full - noise if word == "Pmax" else full + noise


def local_tensor(full, placement, mesh, coordinate):
    """What the rank at ``coordinate`` holds; partial words are resolved axis by axis."""
    for axis, word in enumerate(placement):
        if is_partial(word):
            full = partial_terms(full, word, mesh[axis])[coordinate[axis]]
    block = tuple(word if is_shard(word) else "R" for word in placement)
    return local_block(full, block, mesh, coordinate).clone(memory_format=torch.contiguous_format)


def single_steps(mesh):
    placements = [p for p in itertools.product(WORDS, repeat=len(mesh)) if divides(SHAPE, p, mesh)]
    placements = [p for p in placements if reductions_commute(p)]
    return [(a, b) for a in placements for b in placements if step_between(a, b) is not None]
