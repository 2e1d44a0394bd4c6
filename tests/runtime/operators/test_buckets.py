"""Buckets on ranks: every kind of gather and reduction, any layout in memory, and the bytes that the replay counts."""

from __future__ import annotations

import random
from collections import defaultdict

import pytest
import torch
from support.processes.collective_steps import SHAPE, local_tensor, single_steps
from support.processes.rank_steps import groups_of

from planner.graph.placement import divides, is_shard
from planner.machine.resharding import BUCKETED, step_between
from planner.torch_adapter.local.buckets import start_bucket
from planner.torch_adapter.local.collectives import MeshGroups, ReshardStepError, reshard_step
from planner.torch_adapter.meters.storage_meter import StorageMeter

SHAPES = (SHAPE, (16, 8), (8,), (1, 8, 8), (8, 1, 4, 8))


def changes_alike(mesh):
    """Steps that may share a collective, by mesh axis and what changes there."""
    alike = defaultdict(list)
    for before, after in single_steps(mesh):
        step = step_between(before, after)
        if step is not None and step.collective in BUCKETED:
            old = before[step.axis]
            alike[step.axis, step.collective, "S" if is_shard(old) else old].append((before, after))
    return alike


def parts_of(mesh, groups, steps, seed):
    """Random tensors under the placements of random steps, some of them transposed."""
    rng = random.Random(seed)
    found = []
    while len(found) < rng.randint(2, 5):
        shape, (before, after) = rng.choice(SHAPES), rng.choice(steps)
        dims = [int(word[1:]) for word in (*before, *after) if is_shard(word)]
        if max(dims, default=0) >= len(shape) or not (divides(shape, before, mesh) and divides(shape, after, mesh)):
            continue
        full = torch.randn(shape, generator=torch.Generator().manual_seed(rng.randint(0, 99)))
        source = local_tensor(full, before, mesh, groups.coordinate)
        if rng.random() < 0.5:
            order = rng.sample(range(len(shape)), len(shape))
            place = [order.index(dim) for dim in range(len(shape))]
            source = source.permute(order).contiguous().permute(place)
        found.append((source, before, after))
    return found


def check_buckets(mesh, seeds):
    groups = groups_of(mesh)
    for (_, _, old), steps in sorted(changes_alike(mesh).items()):
        for seed in range(seeds):
            parts = parts_of(mesh, groups, steps, seed)
            kept = [source.clone() for source, _, _ in parts]
            expected = [reshard_step(before, after, groups)(source) for source, before, after in parts]
            start = start_bucket([(before, after) for _, before, after in parts], groups)
            sources = [source for source, _, _ in parts]
            with StorageMeter() as meter:
                meter.track(*sources)
                started = start(*sources)
                results = [each.wait() for each in started]
            for source, before, result, wanted in zip(sources, kept, results, expected, strict=True):
                assert torch.equal(source, before)
                assert result.stride() == wanted.stride()
                assert torch.equal(result, wanted) if old == "S" else torch.allclose(result, wanted, atol=1e-6)
                assert result.untyped_storage().nbytes() == result.nbytes
            sent = 0 if old != "S" and results[0].shape == sources[0].shape else sum(each.nbytes for each in sources)
            received = sum(each.nbytes for each in results)
            held = sum(each.nbytes for each in sources)
            assert meter.peak_bytes - held <= received + max(sent, received), (steps, seed)
            assert meter.peak_bytes - held >= 2 * received, (steps, seed)


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)])
def test_a_bucket_does_what_its_parts_do(mesh, two_ranks, four_ranks):
    (two_ranks if mesh == (2,) else four_ranks).run(check_buckets, mesh, 6)


def check_integers():
    groups = groups_of((2,))
    position = groups.coordinate[0]
    ids, scalar = torch.arange(4) + 10 * position, torch.tensor(3 + position)
    start = start_bucket([(("Pmax",), ("R",)), (("Pmax",), ("R",))], groups)
    first, second = (each.wait() for each in start(ids, scalar))
    assert first.tolist() == [10, 11, 12, 13]
    assert second.item() == 4


def test_integers_and_scalars(two_ranks):
    two_ranks.run(check_integers)


@pytest.mark.parametrize(
    "paths",
    [
        [(("S0", "R"), ("R", "R")), (("R", "S0"), ("R", "R"))],
        [(("Psum", "R"), ("R", "R")), (("Pavg", "R"), ("R", "R"))],
        [(("Psum", "R"), ("R", "R")), (("Psum", "R"), ("S0", "R"))],
        [(("S0", "R"), ("S1", "R")), (("S0", "R"), ("S1", "R"))],
        [(("R", "R"), ("S0", "R")), (("R", "R"), ("S0", "R"))],
        [(("S0", "S0"), ("R", "S0"))],
    ],
)
def test_what_is_no_bucket_is_refused(paths):
    with pytest.raises(ReshardStepError):
        start_bucket(paths, MeshGroups((2, 2), (0, 0), ("left", "right")))
