from __future__ import annotations

import itertools
import random
from math import prod

import pytest
import torch
import torch.distributed as dist
from support.processes.collective_steps import SHAPE, WORDS, local_tensor, single_steps
from support.processes.rank_steps import groups_of
from support.tiers import slow

from planner.graph.placement import divides, is_partial
from planner.machine.resharding import step_of, step_peak_bytes
from planner.torch_adapter.local.collectives import MeshGroups, ReshardStepError, reshard_step, start_step
from planner.torch_adapter.meters.storage_meter import StorageMeter
from runtime.job.process_group import LaunchError
from runtime.measure.local_shards import gather_full


def check_single_steps(mesh):
    groups = groups_of(mesh)
    full = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    steps = single_steps(mesh)
    for before, after in steps:
        source = local_tensor(full, before, mesh, groups.coordinate)
        kept = source.clone()
        result = reshard_step(before, after, groups)(source)
        again = reshard_step(before, after, groups, owned=True)(source.clone())
        torch.testing.assert_close(again, result, rtol=1e-5, atol=1e-5, msg=f"{before} -> {after} in place")
        if any(is_partial(word) for word in after):
            result, expected = gather_full(result, after, groups), full
        else:
            expected = local_tensor(full, after, mesh, groups.coordinate)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5, msg=f"{before} -> {after}")
        assert torch.equal(source, kept), (before, after)
        assert result.is_contiguous(), (before, after)
        assert result.untyped_storage().data_ptr() != source.untyped_storage().data_ptr(), (before, after)
    return len(steps)


def check_memory_of_steps(mesh, every):
    """Bytes alive at the worst moment of each step, against what planner.machine.resharding charges."""
    groups = groups_of(mesh)
    # On a rank some dimensions have one element: they need no copy.
    shapes = SHAPE, (1, *SHAPE[1:]), (prod(mesh), *SHAPE[1:]), (1, 1, SHAPE[2])
    cases = itertools.product(shapes, single_steps(mesh), (False, True))
    for shape, (before, after), owned in itertools.islice(cases, 0, None, every):
        if not (divides(shape, before, mesh) and divides(shape, after, mesh)):
            continue
        full = torch.randn(shape, generator=torch.Generator().manual_seed(3))
        source = local_tensor(full, before, mesh, groups.coordinate)
        step = reshard_step(before, after, groups, owned=owned)
        with StorageMeter() as meter:
            meter.track(source)
            result = step(source)
        charged = step_peak_bytes(step_of(shape, mesh, before, after), source.nbytes, result.nbytes, owned=owned)
        where = shape, before, after, owned, meter.peak_bytes - source.nbytes, charged
        assert meter.peak_bytes == source.nbytes + charged, where


def check_gather_full(mesh):
    groups = groups_of(mesh)
    full = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    for placement in itertools.product(WORDS[:6], repeat=len(mesh)):
        if divides(SHAPE, placement, mesh):
            local = local_tensor(full, placement, mesh, groups.coordinate)
            torch.testing.assert_close(gather_full(local, placement, groups), full, rtol=1e-5, atol=1e-5)


def check_transposed_source():
    mesh = (2,)
    groups = groups_of(mesh)
    full = torch.randn(SHAPE, generator=torch.Generator().manual_seed(3))
    for before, after in single_steps(mesh):
        source = local_tensor(full, before, mesh, groups.coordinate)
        transposed = source.permute(2, 0, 1).contiguous().permute(1, 2, 0)
        result = reshard_step(before, after, groups)(transposed)
        assert torch.equal(result, reshard_step(before, after, groups)(source)), (before, after)
        assert result.permute(2, 0, 1).is_contiguous(), (before, after)
        assert result.untyped_storage().nbytes() == result.nbytes
        assert result.untyped_storage().data_ptr() != transposed.untyped_storage().data_ptr()


def check_expanded_source():
    groups = groups_of((2,))
    source = torch.arange(4.0).view(4, 1).expand(4, 6)
    for before, after in [(("S1",), ("R",)), (("S0",), ("S1",)), (("Psum",), ("S1",)), (("R",), ("S0",))]:
        step = reshard_step(before, after, groups)
        assert torch.equal(step(source), step(source.contiguous())), (before, after)


def check_other_dtypes():
    groups = groups_of((2,))
    position = groups.coordinate[0]
    mask = torch.tensor([position == 0, False, True, position == 1])
    assert reshard_step(("S0",), ("R",), groups)(mask).tolist() == [True, False, True, False, False, False, True, True]
    ids = torch.arange(4) + 10 * position
    assert reshard_step(("Pmax",), ("R",), groups)(ids).tolist() == [10, 11, 12, 13]
    assert reshard_step(("Psum",), ("S0",), groups)(ids).tolist() == [[10, 12], [14, 16]][position]
    half = torch.ones(4, dtype=torch.bfloat16) * (position + 1)
    assert reshard_step(("Pavg",), ("R",), groups)(half).tolist() == [1.5] * 4


def fail_on_rank_one():
    if dist.get_rank() == 1:
        raise RuntimeError("only here")
    dist.barrier()


def sleep_for_ever():
    import time

    time.sleep(60)


@pytest.mark.parametrize("mesh", [(2,), (4,), (2, 2)])
def test_every_single_step_equals_its_definition(mesh, two_ranks, four_ranks):
    pool = two_ranks if mesh == (2,) else four_ranks
    counts = pool.run(check_single_steps, mesh)
    assert counts[0] > (20 if len(mesh) == 1 else 200)


@pytest.mark.parametrize(("mesh", "every"), [((2,), 1), ((2, 2), 3), slow((2, 2), 1)])
def test_memory_of_every_step_is_what_resharding_charges(mesh, every, two_ranks, four_ranks):
    """Of the many pairs of a step and a shape on two axes `make test` takes a third."""
    (two_ranks if mesh == (2,) else four_ranks).run(check_memory_of_steps, mesh, every)


def test_gathering_a_full_tensor_from_any_placement(four_ranks):
    four_ranks.run(check_gather_full, (2, 2))


def test_source_that_is_not_contiguous(two_ranks):
    two_ranks.run(check_transposed_source)
    two_ranks.run(check_expanded_source)


def test_integers_booleans_and_half_precision(two_ranks):
    two_ranks.run(check_other_dtypes)


def gather_many(iterations: int) -> None:
    """Gathers of many sizes, sixty of them under way, while this process allocates and frees beside them."""
    groups, rng = groups_of((2,)), random.Random(0)
    for _ in range(iterations):
        under_way = []
        for _ in range(60):
            tensor = torch.full((rng.choice((2, 128, 512, 2048, 131_072)),), float(groups.coordinate[0]))
            under_way.append(start_step(("S0",), ("R",), groups)(tensor))
            del tensor
            if rng.random() < 0.3:
                under_way.pop(0).wait().mul_(2)
            torch.ones(64).mul_(2)
        for each in under_way:
            first, second = each.wait().chunk(2)
            assert not first.any()
            assert bool((second == 1).all())


@pytest.mark.parametrize("iterations", [50, slow(400)])
def test_many_gathers_may_be_under_way(iterations, two_ranks):
    two_ranks.run(gather_many, iterations)


def gather_complex() -> None:
    """Complex numbers are sent as pairs."""
    groups = groups_of((2,))
    tensor = torch.full((3, 2), 1 + 1j * groups.coordinate[0], dtype=torch.complex64)
    gathered = reshard_step(("S0",), ("R",), groups)(tensor)
    assert gathered[:, 0].tolist() == [1, 1, 1, 1 + 1j, 1 + 1j, 1 + 1j]


def test_complex_numbers_are_gathered(two_ranks):
    two_ranks.run(gather_complex)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("S0", "S0"), ("R", "S0")),
        (("R", "S0"), ("S0", "S0")),
        (("S0", "S1"), ("S1", "S0")),
        (("R", "R"), ("R", "R")),
        (("R", "R"), ("Psum", "R")),
    ],
)
def test_what_is_no_single_collective_is_refused(before, after):
    groups = MeshGroups((2, 2), (0, 0), ("left", "right"))
    with pytest.raises(ReshardStepError, match=r"->"):
        reshard_step(before, after, groups)


def test_the_pool_reports_the_rank_that_failed_and_recovers(two_ranks):
    with pytest.raises(LaunchError, match=r"rank 1 of 2 failed: (.|\n)*only here"):
        two_ranks.run(fail_on_rank_one)
    two_ranks.run(check_other_dtypes)


def test_the_pool_ends_ranks_that_hang(two_ranks):
    with pytest.raises(LaunchError, match=r"ranks \[0, 1\] of 2 did not answer"):
        two_ranks.run(sleep_for_ever, timeout=0.5)
