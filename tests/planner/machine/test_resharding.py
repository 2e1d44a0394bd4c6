"""Resharding: hand-computed steps, brute force, and paths run on blocks of a real array."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.graph.placement import block_index, divides, is_partial, local_numel, local_shape
from planner.machine.cluster import Collective, LinkSpec
from planner.machine.known_costs import KnownCosts, MeasuredCost
from planner.machine.resharding import (
    BUCKETED,
    ReshardPlanner,
    Step,
    step_between,
    step_copies,
    step_of,
    step_peak_bytes,
)

LATENCY, BANDWIDTH, COPY, LAUNCH = 1e-5, 1e9, 1e10, 1e-6
LINK = LinkSpec(latency_seconds=LATENCY, bandwidth=BANDWIDTH)
SLOW = LinkSpec(latency_seconds=5e-5, bandwidth=1e8)


def planner(mesh, links=None, **options):
    return ReshardPlanner(links or [LINK] * len(mesh), mesh, COPY, LAUNCH, **options)


# One axis of 4, a (64, 32) float32 tensor: 8192 bytes whole, 2048 bytes as a shard.
WHOLE, PART = 8192, 2048
RING = 3 * LATENCY


@pytest.mark.parametrize(
    ("source", "target", "seconds", "peak"),
    [
        ("S0", "R", RING + 0.75 * WHOLE / BANDWIDTH + LAUNCH, WHOLE),
        ("S1", "R", RING + 0.75 * WHOLE / BANDWIDTH + 2 * WHOLE / COPY + 2 * LAUNCH, 2 * WHOLE),
        ("Psum", "R", 2 * (RING + 0.75 * WHOLE / BANDWIDTH) + 2 * WHOLE / COPY + 2 * LAUNCH, WHOLE),
        ("Pmax", "R", 2 * (RING + 0.75 * WHOLE / BANDWIDTH) + 2 * WHOLE / COPY + 2 * LAUNCH, WHOLE),
        ("Psum", "S0", RING + 0.75 * WHOLE / BANDWIDTH + LAUNCH, PART),
        ("Pavg", "S1", RING + 0.75 * WHOLE / BANDWIDTH + 2 * WHOLE / COPY + 2 * LAUNCH, WHOLE + PART),
        ("S0", "S1", RING + 0.75 * PART / BANDWIDTH + 2 * PART / COPY + 2 * LAUNCH, 2 * PART),
        ("S1", "S0", RING + 0.75 * PART / BANDWIDTH + 2 * PART / COPY + 2 * LAUNCH, 2 * PART),
        ("R", "S0", 2 * PART / COPY + LAUNCH, PART),
        ("R", "S1", 2 * PART / COPY + LAUNCH, PART),
    ],
)
def test_single_steps_by_hand(source, target, seconds, peak):
    before, after = (4 * local_numel((64, 32), (word,), (4,)) for word in (source, target))
    assert planner((4,)).step_seconds((64, 32), 4, (source,), (target,)) == pytest.approx(seconds)
    assert step_peak_bytes(step_between((source,), (target,)), before, after) == peak


def test_an_all_reduce_is_split_where_that_saves_its_copy():
    whole, split = (("Psum",), ("R",)), (("Psum",), ("S0",), ("R",))
    path = planner((4,)).path((64, 32), 4, ("Psum",), ("R",))
    assert path.placements == split
    assert path.peak_bytes == PART + WHOLE
    ring = LinkSpec(latency_seconds=LATENCY, bandwidth=BANDWIDTH, slowdown={Collective.REDUCE_SCATTER: 2.0})
    assert planner((4,), [ring]).path((64, 32), 4, ("Psum",), ("R",)).placements == whole


def test_all_to_all_between_inner_dimensions_copies_on_both_sides():
    path = planner((4,)).path((2, 16, 16), 4, ("S1",), ("S2",))
    assert path.seconds == pytest.approx(RING + 0.75 * 512 / BANDWIDTH + 4 * 512 / COPY + 3 * LAUNCH)
    assert path.peak_bytes == 2 * 512


@pytest.mark.parametrize(
    ("mesh", "shape", "source", "target", "copies", "peak"),
    [
        ((4,), (1, 64, 32), ("S1",), ("R",), 0, WHOLE),
        ((4,), (1, 64, 32), ("S2",), ("R",), WHOLE, 2 * WHOLE),
        ((4,), (1, 64, 32), ("Psum",), ("S1",), 0, PART),
        ((4,), (1, 64, 32), ("S1",), ("S2",), PART, 2 * PART),
        ((2, 2), (2, 64, 16), ("S0", "S1"), ("S0", "R"), 0, WHOLE // 2),
        ((2, 2), (2, 64, 16), ("R", "S1"), ("R", "R"), WHOLE, 2 * WHOLE),
        ((2, 2), (2, 2, 32), ("R", "S1"), ("R", "S0"), 0, 256),
    ],
)
def test_dimensions_of_one_element_on_a_rank_need_no_copy(mesh, shape, source, target, copies, peak):
    before, after = (4 * local_numel(shape, placement, mesh) for placement in (source, target))
    step = step_of(shape, mesh, source, target)
    assert sum(step_copies(step, before, after)) == copies
    assert step_peak_bytes(step, before, after) == peak


def test_a_longer_path_holds_the_buffer_between_its_steps():
    path = planner((2, 2)).path((8, 8), 4, ("S0", "S0"), ("R", "R"))
    assert path.placements == (("S0", "S0"), ("S0", "R"), ("R", "R"))
    assert path.peak_bytes == 128 + 256


def test_equal_placements_need_nothing():
    path = planner((2, 2)).path((8, 8), 4, ("S0", "R"), ("S0", "R"))
    assert (path.placements, path.seconds, path.peak_bytes) == ((("S0", "R"),), 0.0, 0)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("R", "R"), ("Psum", "R")),
        (("Psum", "R"), ("Pmax", "R")),
        (("Psum", "R"), ("R", "Psum")),
        (("S0", "S0"), ("S1", "R")),  # 3 columns do not divide by 2
        (("R", "R"), ("S2", "R")),
        (("Psum", "Pmax"), ("R", "R")),  # a maximum of sums is no sum of maxima
        (("S1", "R"), ("R", "R")),
    ],
)
def test_impossible_pairs_have_no_path(source, target):
    assert planner((2, 2)).path((8, 3), 4, source, target) is None


def test_a_pending_reduction_stays_where_both_have_it():
    path = planner((2, 2)).path((8, 8), 4, ("Psum", "S0"), ("Psum", "R"))
    assert path.placements == (("Psum", "S0"), ("Psum", "R"))


def test_maxima_are_never_reduce_scattered():
    path = planner((2,)).path((8, 8), 4, ("Pmax",), ("S0",))
    assert path.placements == (("Pmax",), ("R",), ("S0",))


def test_a_slow_axis_is_crossed_with_the_smallest_tensor():
    path = planner((2, 2), [SLOW, LINK]).path((1024, 1024), 4, ("S0", "Psum"), ("R", "S1"))
    assert path.placements == (("S0", "Psum"), ("S0", "S1"), ("R", "S1"))


def test_links_and_mesh_must_agree():
    with pytest.raises(ValueError, match="1 links for a mesh of 2 axes: give one link per axis"):
        ReshardPlanner([LINK], (2, 2), COPY, LAUNCH)


def test_a_jump_is_no_step():
    with pytest.raises(ValueError, match="is not one collective"):
        planner((2, 2)).step_seconds((8, 8), 4, ("S0", "S0"), ("R", "R"))


def words(ndim, *partial):
    return ("R", *(f"S{dim}" for dim in range(ndim)), *partial)


def placements(shape, mesh, *partial):
    every = product(words(len(shape), *partial), repeat=len(mesh))
    return [placement for placement in every if divides(shape, placement, mesh)]


def documented_peak(path, shape, mesh):
    """The table of the module once more, in float32."""
    peak = held = 0
    for at, (source, target) in enumerate(pairwise(path)):
        old, new = next((a, b) for a, b in zip(source, target, strict=True) if a != b)
        if at and old[0] == "P" and new == "R":
            continue
        before, after = (4 * local_numel(shape, placement, mesh) for placement in (source, target))
        during = after
        splits = new[0] == "S" and before > behind(local_shape(shape, source, mesh), new)
        joins = old[0] == "S" and after > behind(local_shape(shape, target, mesh), old)
        if old[0] == "S" and (splits or joins):
            during = 2 * after
        elif old[0] == "P" and splits:
            during = before + after
        peak, held = max(peak, held + during), after
    return peak


def behind(sizes, entry):
    """Bytes from the dimension of a shard on."""
    return 4 * prod(sizes[int(entry[1:]) :])


def every_path(source, target, allowed, longest):
    paths = [(source,)]
    while paths:
        path = paths.pop()
        if path[-1] == target:
            yield path
        elif len(path) <= longest:
            paths += [(*path, p) for p in allowed if p not in path and step_between(path[-1], p) is not None]


@pytest.mark.parametrize("links", [[LINK, LINK], [SLOW, LINK], [LINK, SLOW]])
@pytest.mark.parametrize("shape", [(64, 64), (4096, 1024), (2, 64), (1, 2, 64)])
def test_paths_are_as_cheap_as_brute_force(links, shape):
    mesh = (2, 2)
    plan = planner(mesh, links)
    allowed = placements(shape, mesh, "Psum")
    for source, target in product(allowed, repeat=2):
        options = [
            (
                sum(
                    round(plan.step_seconds(shape, 4, a, b, owned=at > 0) * 1e12)
                    for at, (a, b) in enumerate(pairwise(path))
                ),
                path,
            )
            for path in every_path(source, target, allowed, 4)
        ]
        found = plan.path(shape, 4, source, target)
        if not options:
            assert found is None, (source, target)
            continue
        best = min(cost for cost, _ in options)
        peak = min(documented_peak(path, shape, mesh) for cost, path in options if cost == best)
        assert found.seconds == pytest.approx(best / 1e12, rel=1e-12), (source, target)
        assert found.peak_bytes == peak, (source, target, found)
        assert documented_peak(found.placements, shape, mesh) == peak


class Blocks:
    """A tensor on every rank of a mesh; each collective is done as MPI defines it."""

    def __init__(self, mesh, blocks):
        self.mesh, self.blocks = mesh, blocks

    @classmethod
    def place(cls, whole, placement, mesh, generator):
        blocks = {}
        addends = {(): whole}
        for axis, word in enumerate(placement):
            grown = {}
            for position, array in addends.items():
                for rank, share in enumerate(split_reduction(array, word, mesh[axis], generator)):
                    grown[*position, rank] = share
            addends = grown
        for coordinate in np.ndindex(*mesh):
            blocks[coordinate] = block_of(addends[coordinate], placement, mesh, coordinate)
        return cls(mesh, blocks)

    def apply(self, source, target):
        step = step_between(source, target)
        count, result = self.mesh[step.axis], {}
        for coordinate in self.blocks:
            rank = coordinate[step.axis]
            group = [self.blocks[*coordinate[: step.axis], r, *coordinate[step.axis + 1 :]] for r in range(count)]
            match step.collective:
                case Collective.ALL_GATHER:
                    result[coordinate] = np.concatenate(group, step.source_dim)
                case Collective.ALL_REDUCE:
                    result[coordinate] = REDUCE[source[step.axis]](group)
                case Collective.REDUCE_SCATTER:
                    whole = REDUCE[source[step.axis]](group)
                    result[coordinate] = np.split(whole, count, step.target_dim)[rank]
                case Collective.ALL_TO_ALL:
                    pieces = [np.split(block, count, step.target_dim)[rank] for block in group]
                    result[coordinate] = np.concatenate(pieces, step.source_dim)
                case None:
                    result[coordinate] = np.split(self.blocks[coordinate], count, step.target_dim)[rank]
        return Blocks(self.mesh, result)

    def reduced(self, placement):
        """Do every reduction that is still pending."""
        done = self
        for axis, word in enumerate(placement):
            if is_partial(word):
                replicated = (*placement[:axis], "R", *placement[axis + 1 :])
                done, placement = done.apply(placement, replicated), replicated
        return done, placement


REDUCE = {
    "Psum": lambda group: np.sum(group, 0),
    "Pavg": lambda group: np.mean(group, 0),
    "Pmax": lambda group: np.max(group, 0),
    "Pmin": lambda group: np.min(group, 0),
}


def split_reduction(array, word, count, generator):
    if not is_partial(word):
        return [array] * count
    noise = generator.integers(1, 50, (count, *array.shape)).astype(float)
    match word:
        case "Psum":
            return [*noise[:-1], array - noise[:-1].sum(0)]
        case "Pavg":
            return [*noise[:-1], count * array - noise[:-1].sum(0)]
        case "Pmax":
            return [array, *(array - noise[1:])]
        case _:
            return [array, *(array + noise[1:])]


def block_of(array, placement, mesh, coordinate):
    sizes = local_shape(array.shape, placement, mesh)
    starts = [size * block_index(coordinate, placement, mesh, dim) for dim, size in enumerate(sizes)]
    return array[tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))]


@pytest.mark.slow_cases("mesh5-shape5-partial5")
@pytest.mark.parametrize(
    ("mesh", "shape", "partial"),
    [
        ((2, 2), (8, 4), ("Psum", "Pavg")),
        ((2, 2), (4, 4, 4), ("Psum",)),
        ((2, 2), (4, 2, 4), ("Pmax",)),
        ((2, 3), (6, 12), ("Psum", "Pmin")),
        ((2, 3), (6, 6, 6), ("Psum",)),
        ((2, 2, 2), (8, 8), ("Psum",)),
    ],
)
def test_every_path_brings_the_array_where_it_says(mesh, shape, partial):
    generator = np.random.default_rng(7)
    whole = generator.integers(-99, 99, shape).astype(float)
    plan = planner(mesh, [SLOW, LINK, LINK][: len(mesh)])
    reached = 0
    for source in placements(shape, mesh, *partial):
        start = Blocks.place(whole, source, mesh, generator)
        for target in placements(shape, mesh, *partial):
            path = plan.path(shape, 4, source, target)
            if path is None:
                commuting = {"Psum", "Pavg"} >= {w for w in source if is_partial(w)} or len(partial) == 1
                gains = any(is_partial(new) and new != old for old, new in zip(source, target, strict=True))
                assert gains or not commuting, (source, target)
                continue
            blocks = start
            for before, after in pairwise(path.placements):
                assert sum(a != b for a, b in zip(before, after, strict=True)) == 1
                blocks = blocks.apply(before, after)
                for block in blocks.blocks.values():
                    assert block.shape == local_shape(shape, after, mesh)
            final, placement = blocks.reduced(target)
            for coordinate, block in final.blocks.items():
                np.testing.assert_allclose(block, block_of(whole, placement, mesh, coordinate), atol=1e-9)
            reached += 1
    assert reached > len(placements(shape, mesh)) ** 2 // 2


POOL = placements((8, 8), (2, 2), "Psum")


@given(st.sampled_from(POOL), st.sampled_from(POOL), st.sampled_from([1e7, 1e9, 1e11]), st.sampled_from([0.0, 1e-5]))
def test_a_slower_link_is_never_cheaper(source, target, bandwidth, latency):
    links = [LinkSpec(latency_seconds=latency, bandwidth=rate) for rate in (bandwidth, bandwidth / 10)]
    fast, slow = (planner((2, 2), [link, LINK]).path((8, 8), 4, source, target) for link in links)
    assert (fast is None) == (slow is None)
    assert fast is None or slow.seconds >= fast.seconds


@given(st.sampled_from(POOL), st.sampled_from(POOL), st.sampled_from(POOL))
def test_no_detour_is_cheaper(source, middle, target):
    plan = planner((2, 2), [SLOW, LINK])
    legs = plan.path((8, 8), 4, source, middle), plan.path((8, 8), 4, middle, target)
    if None not in legs:
        assert plan.path((8, 8), 4, source, target).seconds <= sum(leg.seconds for leg in legs) + 1e-12


def test_tables_hold_what_the_paths_say():
    plan, shape = planner((2, 2), [SLOW, LINK]), (8, 3)
    sources = [*placements(shape, (2, 2), "Psum"), ("S1", "R")]
    targets = [("R", "R"), ("S0", "S0"), ("S1", "R"), ("Psum", "R")]
    seconds, target_bytes, peak_bytes = plan.tables(shape, 2, sources, targets)
    assert target_bytes.tolist() == [48, 12, 0, 48]
    assert seconds.shape == peak_bytes.shape == (len(sources), 4)
    for (i, source), (j, target) in product(enumerate(sources), enumerate(targets)):
        path = plan.path(shape, 2, source, target)
        assert seconds[i, j] == (np.inf if path is None else path.seconds)
        assert peak_bytes[i, j] == (0 if path is None else path.peak_bytes)
        assert path is None or source == target or path.peak_bytes >= target_bytes[j]
    with pytest.raises(ValueError, match="read-only"):
        seconds[0, 0] = 1.0


@pytest.mark.parametrize("collective", sorted(BUCKETED))
def test_no_bucket_takes_less_than_the_least_shares_of_its_parts(collective):
    rng = np.random.default_rng(len(collective))
    kind = str(collective)
    dims = {Collective.ALL_GATHER: (0, None), Collective.REDUCE_SCATTER: (None, 0)}.get(collective, (None, None))
    step = Step(0, collective, *dims)
    for _ in range(100):
        measured = {
            f"4 ranks: {k}": MeasuredCost(seconds=float(size * rng.uniform(0.2, 5)), modelled=float(size))
            for k, size in enumerate(10.0 ** rng.uniform(-6, -1, size=rng.integers(0, 5)))
        }
        known = KnownCosts({kind: measured} if measured else {}, 4)
        link = LinkSpec(latency_seconds=LATENCY, bandwidth=BANDWIDTH, slowdown={collective: float(rng.uniform(0.8, 2))})
        found = planner((4,), [link], known=known)
        parts = [4 * int(size) for size in 10.0 ** rng.uniform(0, 7, size=rng.integers(1, 9))]
        ratio = {Collective.ALL_GATHER: (1, 4), Collective.REDUCE_SCATTER: (4, 1)}.get(collective, (1, 1))
        least = sum(found.least_seconds(step, ratio[0] * size, ratio[1] * size) for size in parts)
        assert least <= found.flat_seconds(step, ratio[0] * sum(parts), ratio[1] * sum(parts))
        assert least > 0
