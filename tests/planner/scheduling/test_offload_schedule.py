"""Offload written into schedules: correct, never more memory, no avoidable wait, nothing earlier than needed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.steps.hand_graphs import FLOAT, GraphMaker
from support.steps.offload_case import SCHEDULE as OFFLOADED
from support.steps.offload_case import CopyPrices, training_step
from support.steps.plain_schedule import replicated_schedule
from support.steps.replay_case import ADAMW, GRAPH, SCHEDULE, SGD

from planner.graph.operator_graph import OutputRole, Phase, ValueRole
from planner.machine.cluster import HostCopies
from planner.replay.checker import replay
from planner.replay.clocks import step_time
from planner.replay.memory import LocalBytes
from planner.schedule.instructions import Compute, Free, Offload, Prefetch, Update
from planner.scheduling.offload_limit import DeviceLimit
from planner.scheduling.offload_schedule import offload_candidates, with_offload
from runtime.operators.schedule_lifetimes import check_schedule


def offload_case(draw, way=HostCopies.BOTH_WAYS, most=4):
    """Graph, plain schedule, some of its candidates, prices."""
    graph = training_step(draw)
    plain = replicated_schedule(graph, (1,))
    candidates = offload_candidates(graph, plain)
    assume(candidates)
    chosen = draw(st.lists(st.sampled_from(candidates), min_size=1, max_size=most, unique=True))
    copies = {value.index: draw(st.sampled_from([0, 2, 5, 10, 23, 60])) for value in graph.values}
    return graph, plain, chosen, CopyPrices(copies, way)


@given(data=st.data(), way=st.sampled_from(list(HostCopies)))
@settings(max_examples=200, deadline=None)
def test_the_step_stays_correct_and_never_holds_more(data, way):
    graph, plain, chosen, prices = offload_case(data.draw, way)
    schedule = with_offload(graph, plain, chosen, prices)
    check_schedule(schedule, (1,))
    before, after = (replay(graph, entry, optimizer=SGD, seconds=prices) for entry in (plain, schedule))
    assert after.violations == ()
    assert after.total_quanta == before.total_quanta + after.stall_quanta
    offloads = [schedule.buffers[entry.source].value for entry in schedule.instructions if isinstance(entry, Offload)]
    assert sorted(offloads) == sorted(chosen)
    assert sum(isinstance(entry, Prefetch) for entry in schedule.instructions) == len(chosen)
    held_before, held_after = bytes_by_work(graph, plain, before), bytes_by_work(graph, schedule, after)
    assert list(held_before) == list(held_after)
    assert all(held_after[key] <= held for key, held in held_before.items())


def bytes_by_work(graph, schedule, report):
    """Bytes held while each operator runs that is no view (each runs once), in order."""
    return {
        entry.operator: int(report.profile.total_during[at])
        for at, entry in enumerate(schedule.instructions)
        if isinstance(entry, Compute) and not graph.operators[entry.operator].is_view
    }


@pytest.mark.slow
@given(data=st.data(), way=st.sampled_from(list(HostCopies)))
@settings(max_examples=200, deadline=None)
def test_a_limit_is_kept_wherever_the_activations_make_room(data, way):
    graph, plain, chosen, prices = offload_case(data.draw, way, most=6)
    before = replay(graph, plain, optimizer=SGD, seconds=prices)
    lazy = replay(graph, with_offload(graph, plain, chosen, prices), optimizer=SGD, seconds=prices)
    eager = CopyPrices(prices.copies, HostCopies.BLOCKING)
    smallest = replay(graph, with_offload(graph, plain, chosen, eager), optimizer=SGD).peak_bytes
    limit = data.draw(st.integers(smallest - 1, before.peak_bytes))
    during = before.profile.total_during
    schedule = with_offload(graph, plain, chosen, prices, DeviceLimit(during, limit))
    check_schedule(schedule, (1,))
    after = replay(graph, schedule, optimizer=SGD, seconds=prices)
    assert after.violations == ()
    assert after.peak_bytes <= max(limit, smallest)
    assert np.array_equal(during, before.profile.total_during)
    if limit >= lazy.peak_bytes:
        assert schedule == with_offload(graph, plain, chosen, prices)


def with_prefetches_at(schedule, moves):
    """The schedule with its prefetches moved to stand before instructions of the rest, in their order."""
    prefetches = [entry for entry in schedule.instructions if isinstance(entry, Prefetch)]
    rest = [entry for entry in schedule.instructions if not isinstance(entry, Prefetch)]
    found = []
    for at in range(len(rest) + 1):
        found += [prefetch for prefetch, place in zip(prefetches, moves, strict=True) if place == at]
        found += rest[at : at + 1]
    return replace(schedule, instructions=tuple(found))


def prefetch_places(schedule):
    """Places of the prefetches as :func:`with_prefetches_at` counts them, and the range that each may have."""
    places, earliest, latest, count = [], [], [], 0
    freed, fetched = {}, []
    for entry in schedule.instructions:
        if isinstance(entry, Prefetch):
            places.append(count)
            fetched.append(entry)
            continue
        if isinstance(entry, Free):
            freed.update(dict.fromkeys(entry.buffers, count))
        count += 1
    rest = [entry for entry in schedule.instructions if not isinstance(entry, Prefetch)]
    source = {entry.target: entry.source for entry in rest if isinstance(entry, Offload)}
    for entry in fetched:
        earliest.append(freed[source[entry.source]] + 1)
        latest.append(next(at for at, i in enumerate(rest) if isinstance(i, Compute) and entry.target in i.inputs))
    return places, earliest, latest


def stall(graph, schedule, prices):
    time, _ = step_time(graph, schedule, prices, LocalBytes(graph, schedule.mesh))
    return time.stalled


@given(data=st.data())
@settings(max_examples=80, deadline=None)
def test_no_other_moments_wait_less_and_hidden_copies_start_as_late_as_they_can(data):
    graph, plain, chosen, prices = offload_case(data.draw, most=2)
    schedule = with_offload(graph, plain, chosen, prices)
    places, earliest, latest = prefetch_places(schedule)
    found = stall(graph, schedule, prices)
    ranges = [range(first, last + 1) for first, last in zip(earliest, latest, strict=True)]
    others = {
        moves: stall(graph, with_prefetches_at(schedule, moves), prices)
        for moves in product(*ranges)
        if list(moves) == sorted(moves)
    }
    assert found == others[tuple(places)]
    assert found == min(others.values())
    if found == 0:
        begins = begin_times(graph, without_prefetches(schedule))
        moments = [begins[at] for at in places]
        for moves, waited in others.items():
            later = [begins[at] for at in moves]
            assert waited or later == moments or any(a < b for a, b in zip(later, moments, strict=True))


def begin_times(graph, instructions):
    """When instructions begin while nothing waits."""
    begins = [0]
    for entry in instructions:
        works = isinstance(entry, Compute) and not graph.operators[entry.operator].is_view
        begins.append(begins[-1] + (10 if works else isinstance(entry, Update)))
    return begins


def without_prefetches(schedule):
    return [entry for entry in schedule.instructions if not isinstance(entry, Prefetch)]


def ladder():
    """Four forward operators, each kept for its own backward operator, last made first used."""
    make = GraphMaker()
    w, x = make.parameter("w", (8,)), make.input("x", ValueRole.INPUT, (8,))
    tangent = make.input("tangent", ValueRole.TANGENT, (8,))
    kept = [x]
    for _ in range(4):
        kept += make.operator("up", [kept[-1]], [((8,), FLOAT)])
    make.output(OutputRole.LOSS, *make.operator("sum", [kept[-1], w], [((), FLOAT)]))
    gradient = tangent
    for value in reversed(kept[1:]):
        (gradient,) = make.operator("down", [gradient, value], [((8,), FLOAT)], Phase.BACKWARD)
    make.output(OutputRole.GRADIENT, gradient, w)
    return make.graph(), kept[1:]


def places_by_operator(graph, schedule):
    """Per value, the operators that run next after its offload, the free of its source, its prefetch."""
    found = {}
    for at, entry in enumerate(schedule.instructions):
        following = next(
            (graph.operators[i.operator].index for i in schedule.instructions[at:] if isinstance(i, Compute)), None
        )
        if isinstance(entry, Offload):
            found[entry.source] = [schedule.buffers[entry.source].value, following]
        elif isinstance(entry, Free):
            for buffer in set(entry.buffers) & set(found):
                found[buffer].append(following)
        elif isinstance(entry, Prefetch):
            owner = next(owner for owner in found if found[owner][0] == schedule.buffers[entry.target].value)
            found[owner].append(following)
    return {value: tuple(moments) for value, *moments in found.values()}


@pytest.mark.parametrize(
    ("duration", "moments", "stalled"),
    [
        # Operators 0-4 are forward, 5-8 backward, 10 each: value k+1 is made by k and read by k+1 and 8-k.
        (5, {1: (1, 2, 7), 2: (2, 3, 6)}, 0),
        (10, {1: (1, 2, 7), 2: (2, 3, 6)}, 0),
        # Out until 25 and 40. The copies in hold the link for 15 each up to 70 and 80: they start at 65 and 50, the
        # operators before.
        (15, {1: (1, 3, 6), 2: (2, 4, 5)}, 0),
        # Out until 35 and 60; value 2 comes back 60-85 to its reader at 70, which waits 15, value 1 85-110 at 95.
        (25, {1: (1, 4, 7), 2: (3, 6, 6)}, 30),
    ],
)
def test_moments_by_hand(duration, moments, stalled):
    graph, kept = ladder()
    plain = replicated_schedule(graph, (1,))
    prices = CopyPrices(dict.fromkeys(kept, duration))
    schedule = with_offload(graph, plain, kept[:2], prices)
    assert places_by_operator(graph, schedule) == {kept[k - 1]: found for k, found in moments.items()}
    assert replay(graph, schedule, optimizer=SGD, seconds=prices).stall_quanta == stalled


def test_nothing_offloaded_changes_nothing():
    assert with_offload(GRAPH, SCHEDULE, (), CopyPrices()) == SCHEDULE


def test_recomputed_and_resharded_uses_read_what_comes_back():
    # The dropped activation (value 7) is read again by the recomputation of relu; its mask (8) by backward.
    schedule = with_offload(GRAPH, SCHEDULE, (7, 8), CopyPrices({7: 1, 8: 1}))
    report = replay(GRAPH, schedule, optimizer=ADAMW, counter_based_random=True)
    assert report.violations == ()
    assert report.recomputed == 1
    again = next(entry for entry in schedule.instructions if isinstance(entry, Compute) and entry.recompute)
    assert again.inputs == tuple(
        entry.target
        for entry in schedule.instructions
        if isinstance(entry, Prefetch)
        if schedule.buffers[entry.target].value == 7
    )


def test_candidates_are_what_may_wait_for_backward():
    # 6 is used in forward only, 9 is recomputed, 12 is the loss, 14 a buffer update, 5 and 10 are views.
    assert offload_candidates(GRAPH, SCHEDULE) == (7, 8)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (0, "w1 is not an output of an operator that owns its storage"),
        (5, "aten.t/0#0 is not an output of an operator that owns its storage"),
        (12, "aten.sum/6#0 is not made in forward and used again in backward"),
        (14, "aten.add/8#0 is part of a result of the step"),
        (9, "aten.relu/3#0 is not made in forward and used again in backward"),
        (17, "aten.mm/11#0 is not made in forward and used again in backward"),
    ],
)
def test_what_cannot_be_offloaded_is_refused_by_name(value, message):
    with pytest.raises(ValueError, match=message):
        with_offload(GRAPH, SCHEDULE, (8, value), CopyPrices({7: 1, 8: 1}))


def test_a_schedule_that_offloads_already_is_refused():
    with pytest.raises(ValueError, match="offloads already: decide on all activations at once"):
        with_offload(GRAPH, OFFLOADED, (8,), CopyPrices())
