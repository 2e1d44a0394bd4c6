"""Host buffers and copies in the replay: bytes and times by hand, one corruption per rule, a naive simulation."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.steps.offload_case import (
    SCHEDULE,
    CopyPrices,
    check,
    inserted,
    moved,
    offload_program,
    ticked_time,
    with_instruction,
    without,
)
from support.steps.replay_case import SCHEDULE as DEVICE_SCHEDULE
from support.steps.replay_case import SGD
from support.steps.replay_case import Prices as DevicePrices
from support.steps.replay_case import check as check_on_device

from planner.machine.cluster import HostCopies
from planner.replay.checker import ViolationKind, replay
from planner.schedule.instructions import Buffer, Free, Offload, Prefetch

HIDDEN, WIDE = 3, 6  # values
K = ViolationKind


def test_host_bytes_are_counted_apart_and_device_bytes_drop():
    report = check(SCHEDULE, seconds=CopyPrices({HIDDEN: 1, WIDE: 1}))
    assert report.violations == ()
    # 64 w, 256 x, 4 tangent.
    assert sum(report.profile.at_start.values()) == 324
    during = report.profile.total_during
    # hidden, active and wide; wide and square; wide, its gradient and hidden back.
    assert [int(during[at]) for at in (5, 8, 15)] == [324 + 1024, 324 + 1024, 328 + 512 + 512 + 256]
    assert [int(during[at]) for at in (7, 12, 13, 14)] == [324 + 512, 328, 328 + 512, 328 + 768]
    assert report.peak_bytes == 328 + 1280
    assert sum(tensor.nbytes for tensor in report.alive_at_peak) == report.peak_bytes
    assert report.host.after.tolist() == [0] * 4 + [256] * 5 + [768] * 7 + [256] * 4 + [0] * 8
    assert (report.host.peak_bytes, report.host.peak_instruction) == (768, 9)
    assert (report.host.offloaded_bytes, report.host.prefetched_bytes) == (768, 768)


@pytest.mark.parametrize(
    ("copies", "way", "stall", "hidden"),
    [
        # hidden leaves 20-30 and is freed at 30; wide takes no time.
        ({HIDDEN: 10, WIDE: 0}, HostCopies.BOTH_WAYS, 0, 1536),
        # wide leaves 40-50 and is freed at 50; it comes back 50-60, for which its reader waits.
        ({HIDDEN: 10, WIDE: 10}, HostCopies.BOTH_WAYS, 10, 1024),
        # hidden leaves 20-35, freeing it waits 5; wide comes back 55-56, its reader waits 1; hidden 56-71 is early.
        ({HIDDEN: 15, WIDE: 1}, HostCopies.BOTH_WAYS, 6, 768),
        # wide leaves 40-70, freeing it waits 20; it comes back 70-100, its reader waits 30; hidden 100-110 is early.
        ({HIDDEN: 10, WIDE: 30}, HostCopies.BOTH_WAYS, 50, 512),
        ({HIDDEN: 10, WIDE: 10}, HostCopies.TAKE_TURNS, 10, 1024),
        ({HIDDEN: 10, WIDE: 30}, HostCopies.BLOCKING, 80, 0),
    ],
)
def test_time_by_hand(copies, way, stall, hidden):
    report = check(SCHEDULE, seconds=CopyPrices(copies, way))
    # Nine operators that are no views, one update.
    assert report.total_quanta == 91 + stall
    assert (report.stall_quanta, report.hidden_bytes) == (stall, hidden)


def test_without_offload_nothing_is_on_the_host_and_nothing_waits():
    report = check_on_device(DEVICE_SCHEDULE, seconds=DevicePrices())
    assert (report.host.peak_bytes, report.host.peak_instruction, report.stall_quanta, report.hidden_bytes) == (
        0,
        -1,
        0,
        0,
    )
    assert report.host.after.tolist() == [0] * len(DEVICE_SCHEDULE.instructions)


OFFLOAD_HIDDEN, OFFLOAD_WIDE, FETCH_WIDE, FETCH_HIDDEN = 4, 9, 13, 14
FREE_HIDDEN, FREE_HIDDEN_HOST = 7, 20
HIDDEN_DEVICE, HIDDEN_HOST, HIDDEN_BACK = 3, 6, 12
VIEW_AGAIN, UPDATE = 19, 26
GRADIENT, W, X = 18, 0, 1


def with_buffer(index, buffer):
    return replace(SCHEDULE, buffers=(*SCHEDULE.buffers[:index], buffer, *SCHEDULE.buffers[index + 1 :]))


def reading(at, *inputs):
    return with_instruction(at, replace(SCHEDULE.instructions[at], inputs=inputs))


def extended(at, *instructions):
    """Instructions put in, with a new buffer like the hidden activation."""
    found = SCHEDULE.instructions
    return replace(
        SCHEDULE,
        buffers=(*SCHEDULE.buffers, SCHEDULE.buffers[HIDDEN_DEVICE]),
        instructions=(*found[:at], *instructions, *found[at:]),
    )


NEW = len(SCHEDULE.buffers)

CORRUPTIONS = {
    "host buffer read by an operator": (lambda: reading(VIEW_AGAIN, HIDDEN_HOST), {K.HOST_READ}),
    "host buffer offloaded again": (
        lambda: extended(5, Offload(HIDDEN_HOST, NEW), Free((NEW,))),
        {K.HOST_READ, K.NEVER_PREFETCHED},
    ),
    "prefetch of a device buffer": (
        lambda: with_instruction(FETCH_HIDDEN, Prefetch(X, HIDDEN_BACK)),
        {K.PREFETCH_SOURCE, K.WRONG_VALUE, K.NEVER_PREFETCHED},
    ),
    "prefetch of what was not offloaded": (
        lambda: extended(5, Prefetch(HIDDEN_DEVICE, NEW), Free((NEW,))),
        {K.PREFETCH_SOURCE},
    ),
    "prefetch of another host buffer": (
        lambda: with_instruction(FETCH_HIDDEN, Prefetch(9, HIDDEN_BACK)),
        {K.WRONG_VALUE, K.NEVER_PREFETCHED},
    ),
    "prefetch before the offload": (lambda: moved(FETCH_HIDDEN, 2), {K.USED_BEFORE_CREATED}),
    "prefetch after the host buffer is freed": (lambda: moved(FREE_HIDDEN_HOST, 13), {K.USED_AFTER_FREE}),
    "offload after the source is freed": (lambda: moved(OFFLOAD_HIDDEN, FREE_HIDDEN), {K.USED_AFTER_FREE}),
    "offload before its operator": (lambda: moved(OFFLOAD_HIDDEN, 0), {K.USED_BEFORE_CREATED}),
    "source read after it is freed": (lambda: reading(VIEW_AGAIN, HIDDEN_DEVICE), {K.USED_AFTER_FREE}),
    "target read before the prefetch": (lambda: moved(FETCH_HIDDEN, 19), {K.USED_BEFORE_CREATED}),
    "host buffer never freed": (lambda: without(FREE_HIDDEN_HOST), {K.NEVER_FREED}),
    "host buffer freed twice": (lambda: inserted(21, Free((HIDDEN_HOST,))), {K.FREED_TWICE}),
    "host buffer never prefetched": (
        lambda: extended(5, Offload(HIDDEN_DEVICE, NEW), Free((NEW,))),
        {K.NEVER_PREFETCHED},
    ),
    "source never freed": (lambda: without(FREE_HIDDEN), {K.NEVER_FREED}),
    "offload into an existing buffer": (
        lambda: with_instruction(OFFLOAD_HIDDEN, Offload(HIDDEN_DEVICE, X)),
        {K.CREATED_TWICE, K.WRONG_VALUE, K.NEVER_CREATED, K.USED_BEFORE_CREATED, K.FREED_BEFORE_CREATED},
    ),
    "parameter": (
        lambda: replace(extended(5, Offload(W, NEW), Free((NEW,))), buffers=(*SCHEDULE.buffers, SCHEDULE.buffers[W])),
        {K.OFFLOAD_SOURCE, K.NEVER_PREFETCHED},
    ),
    "gradient of a parameter": (
        lambda: replace(
            extended(UPDATE, Offload(GRADIENT, NEW), Free((NEW,))),
            buffers=(*SCHEDULE.buffers, SCHEDULE.buffers[GRADIENT]),
        ),
        {K.OFFLOAD_SOURCE, K.NEVER_PREFETCHED},
    ),
    "loss": (
        lambda: replace(
            extended(13, Offload(10, NEW), Free((NEW,))), buffers=(*SCHEDULE.buffers, SCHEDULE.buffers[10])
        ),
        {K.OFFLOAD_SOURCE, K.NEVER_PREFETCHED},
    ),
    "view": (
        lambda: replace(extended(3, Offload(4, NEW), Free((NEW,))), buffers=(*SCHEDULE.buffers, SCHEDULE.buffers[4])),
        {K.OFFLOAD_SOURCE, K.NEVER_PREFETCHED},
    ),
    "prefetched buffer": (
        lambda: extended(15, Offload(HIDDEN_BACK, NEW), Free((NEW,))),
        {K.OFFLOAD_SOURCE, K.NEVER_PREFETCHED},
    ),
    "result on the host": (
        lambda: replace(extended(5, Offload(HIDDEN_DEVICE, NEW)), results=(NEW, SCHEDULE.results[1])),
        {K.HOST_READ, K.WRONG_VALUE, K.NEVER_FREED},
    ),
    "another value on the host": (
        lambda: with_buffer(HIDDEN_HOST, Buffer(1, ("R",))),
        {K.WRONG_VALUE},
    ),
    "copy that changes the placement": (
        lambda: replace(with_buffer(HIDDEN_HOST, Buffer(HIDDEN, ("S0",))), mesh=(2,)),
        {K.TRANSFER_PLACEMENT},
    ),
    "offload that is left out": (
        lambda: without(OFFLOAD_HIDDEN),
        {K.USED_BEFORE_CREATED, K.FREED_BEFORE_CREATED, K.NEVER_CREATED},
    ),
    "unknown buffer": (lambda: with_instruction(OFFLOAD_HIDDEN, Offload(99, HIDDEN_HOST)), {K.INVALID_INDEX}),
}


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_each_violation_is_named(name):
    corrupt, expected = CORRUPTIONS[name]
    report = check(corrupt(), seconds=CopyPrices({HIDDEN: 1, WIDE: 1}))
    assert report.kinds == expected, "\n".join(map(str, report.violations))
    assert report.total_quanta is None


def field_corruptions():
    """Every instruction left out or doubled, every buffer of every copy and free replaced by every other one."""
    found, count = SCHEDULE.instructions, len(SCHEDULE.buffers)
    for at, entry in enumerate(found):
        yield without(at)
        yield inserted(at, entry)
        match entry:
            case Offload(source, target) | Prefetch(source, target):
                for other in range(-1, count + 1):
                    if other != source:
                        yield with_instruction(at, replace(entry, source=other))
                    if other != target:
                        yield with_instruction(at, replace(entry, target=other))
                swapped = Prefetch if isinstance(entry, Offload) else Offload
                yield with_instruction(at, swapped(source, target))
            case Free(buffers):
                for position, buffer in enumerate(buffers):
                    yield with_instruction(at, Free((*buffers[:position], *buffers[position + 1 :])))
                    for other in range(-1, count + 1):
                        if other != buffer:
                            yield with_instruction(at, Free((*buffers[:position], other, *buffers[position + 1 :])))


def test_every_corruption_of_a_copy_is_caught():
    corruptions = list(field_corruptions())
    assert len(corruptions) > 400
    assert [corrupted for corrupted in corruptions if check(corrupted).ok] == []


def test_messages_name_the_copy():
    report = check(reading(VIEW_AGAIN, HIDDEN_HOST))
    assert str(report.violations[0]) == (
        "instruction 19: host_read: compute of net/backward/aten.view/8 reads "
        "buffer 6 (net/forward/aten.mm/0#0 as [R]), which is on the host"
    )


def test_host_limit_is_a_violation_at_its_peak():
    assert check(SCHEDULE, host_limit=768).ok
    report = check(SCHEDULE, host_limit=767)
    assert report.kinds == {K.OVER_HOST_LIMIT}
    assert report.violations[0].instruction == OFFLOAD_WIDE
    assert "768 bytes on the host, 1 more than 767" in str(report.violations[0])


def test_a_copy_without_a_price_leaves_no_total():
    report = check(SCHEDULE, seconds=CopyPrices({HIDDEN: 1}))
    assert report.kinds == {K.UNPRICED}
    assert [violation.instruction for violation in report.violations] == [OFFLOAD_WIDE, FETCH_WIDE]


def naive_host_bytes(graph, schedule):
    """Bytes on the host after each instruction from a set of host buffers."""
    there, found = set(), []
    for entry in schedule.instructions:
        if isinstance(entry, Offload):
            there.add(entry.target)
        elif isinstance(entry, Free):
            there.difference_update(entry.buffers)
        found.append(sum(graph.values[schedule.buffers[buffer].value].spec.nbytes for buffer in there))
    return found


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_times_and_bytes_equal_a_naive_simulation(data):
    graph, schedule = offload_program(data.draw)
    prices = CopyPrices(
        {value.index: data.draw(st.sampled_from([0, 3, 10, 25, 60])) for value in graph.values},
        data.draw(st.sampled_from(list(HostCopies))),
    )
    report = replay(graph, schedule, optimizer=SGD, seconds=prices)
    assert report.violations == ()
    total = ticked_time(schedule, prices)
    assert report.total_quanta == total
    assert report.host.after.tolist() == naive_host_bytes(graph, schedule)
    assert report.stall_quanta == total - 10 * len(graph.operators)
    all_hidden = report.host.offloaded_bytes + report.host.prefetched_bytes == report.hidden_bytes
    assert all_hidden == (report.stall_quanta == 0)
