"""Overlapped collectives in the replay: times by hand, bytes by hand, and every way to be wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.steps.planned_steps import strategy_space

from planner.graph.optimizers import optimizer_named
from planner.machine.cluster import HostCopies
from planner.overlap.buckets import BucketRule
from planner.overlap.serial import SerialSchedule
from planner.overlap.timetable import Room, overlapped
from planner.replay.checker import OptimizerMemory, replay
from planner.replay.clocks import BucketCosts
from planner.replay.memory import LocalBytes
from planner.replay.report import ViolationKind
from planner.replay.streams import Slowdowns, Streams
from planner.schedule.instructions import Compute, Free, Reshard, Schedule, Update, Wait, buckets, waits
from planner.scheduling.builder import build_schedule
from planner.strategies.random_decision import random_decision

SPACE = strategy_space("mlp", (2,))
SERIAL = build_schedule(SPACE, random_decision(SPACE, 1))
SGD = OptimizerMemory(optimizer_named("sgd"))


class Prices:
    """Operators take 100, collectives what is given, updates 1."""

    host_copies = HostCopies.BOTH_WAYS

    def __init__(self, collective=100, slowdowns=None):
        self.collective, self.slowdowns = collective, slowdowns or Slowdowns()

    def compute_quanta(self, operator, outputs, inputs):
        return 100

    def reshard_quanta(self, value, path, in_place):
        return self.collective

    def bucket_quanta(self, parts):
        """As one collective and two operators."""
        return BucketCosts((self.collective, *[0] * (len(parts) - 1)), 20, 30)

    def update_quanta(self, parameter, placement):
        return 1


def check(schedule, prices=None):
    return replay(SPACE.graph, schedule, optimizer=SGD, seconds=prices or Prices(), counter_based_random=True)


PARTS, ROOM = SerialSchedule(SPACE.graph, SERIAL, Prices()), Room(check(SERIAL).profile.total_during, None)
BESIDE = overlapped(PARTS, ROOM)
STARTS = waits(BESIDE.instructions)


def changed(at, *entries):
    found = BESIDE.instructions
    return replace(BESIDE, instructions=(*found[:at], *entries, *found[at + 1 :]))


def test_the_schedule_is_correct_and_shorter():
    assert check(BESIDE).ok
    assert check(BESIDE).total_quanta < check(SERIAL).total_quanta
    assert check(BESIDE).overlapped_quanta == 100 * len(STARTS)


def test_a_wait_right_behind_its_start_hides_nothing():
    start, wait = next(iter(STARTS.items()))
    entries = [entry for at, entry in enumerate(BESIDE.instructions) if at != wait]
    entries.insert(start + 1, BESIDE.instructions[wait])
    report = check(replace(BESIDE, instructions=tuple(entries)), Prices(10**6))
    assert report.ok, report.violations
    assert report.exposed_quanta >= 10**6 - 100 * len(BESIDE.instructions)


def streamed(quanta, *entries, slowdowns=None):
    """Time of entries with these costs: an overlapped all-reduce of buffer 1 of 100, what is given, and its wait."""
    start = Reshard(0, 1, (("Psum",), ("R",)), overlapped=True)
    schedule = Schedule((2,), (), (), (start, *entries, Wait(1)), ())
    streams = Streams(schedule, Prices(slowdowns=slowdowns), lambda value, placement: 0)
    return streams.run([100, *quanta, 0], {})


OPERATORS = (Compute(0, (2,), (3,)), Compute(1, (3,), (4,)))


@pytest.mark.parametrize(
    ("quanta", "slowdowns", "total", "exposed"),
    [
        ((60, 60), None, 120, 0),
        ((30, 30), None, 100, 40),
        # 60 take 90 beside it; of the next 60, 10 pass until it ends, in which 6 are done: 90 + 10 + 54.
        ((60, 60), Slowdowns(1500, 1000), 154, 0),
        # It takes 130 beside the first operator, which is longer.
        ((200, 0), Slowdowns(1000, 1300), 200, 0),
        # Of its 100, 92.3 are done in 120; the rest takes 7.7.
        ((60, 60), Slowdowns(1000, 1300), 128, 8),
        ((50, 50), Slowdowns(1000, 1300), 124, 24),
    ],
)
def test_slowdowns_by_hand(quanta, slowdowns, total, exposed):
    found = streamed(quanta, *OPERATORS, slowdowns=slowdowns)
    assert (found.total, found.exposed, found.overlapped) == (total, exposed, 100)
    assert sum(found.durations) == total


def test_collectives_of_one_axis_share_its_link():
    beside = streamed([40], Reshard(2, 3, (("S0",), ("R",))))
    assert beside.durations == (0, 80, 60)
    assert beside.total == 140, "the link has as much to do as one after the other"
    longer = streamed([300], Reshard(2, 3, (("S0",), ("R",))))
    assert longer.total == 400
    assert streamed([40], Reshard(2, 3, (("R",), ("S0",)))).durations == (0, 40, 60), "a slice needs no link"


def test_bytes_of_a_target_count_from_its_start():
    report, local_bytes = check(BESIDE), LocalBytes(SPACE.graph, BESIDE.mesh)
    held = sum(report.profile.after.values())
    for start in STARTS:
        target = BESIDE.buffers[BESIDE.instructions[start].target]
        before = sum(report.profile.at_start.values()) if start == 0 else held[start - 1]
        assert held[start] - before == local_bytes(target.value, target.placement)


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (lambda: changed(next(iter(STARTS.values()))), ViolationKind.NEVER_WAITED),
        (lambda: changed(0, Wait(0), BESIDE.instructions[0]), ViolationKind.WAIT),
        (
            lambda: changed(
                next(iter(STARTS)),
                BESIDE.instructions[next(iter(STARTS))],
                Free((BESIDE.instructions[next(iter(STARTS))].target,)),
            ),
            ViolationKind.IN_FLIGHT,
        ),
    ],
)
def test_what_is_wrong_is_found(damage, kind):
    assert kind in check(damage()).kinds


def test_a_result_is_not_read_before_its_wait():
    start, wait = next((start, wait) for start, wait in STARTS.items() if wait + 1 < len(BESIDE.instructions))
    target = BESIDE.instructions[start].target
    entries = [entry for at, entry in enumerate(BESIDE.instructions) if at != wait]
    reader = next(
        at
        for at, entry in enumerate(entries)
        if (at > start and target in getattr(entry, "inputs", ()))
        or (isinstance(entry, Update) and entry.gradient == target)
    )
    entries.insert(reader + 1, BESIDE.instructions[wait])
    assert ViolationKind.IN_FLIGHT in check(replace(BESIDE, instructions=tuple(entries))).kinds


def test_only_single_collectives_overlap():
    at = next(at for at, entry in enumerate(SERIAL.instructions) if isinstance(entry, Reshard))
    entry = SERIAL.instructions[at]
    twice = replace(entry, path=(*entry.path, *reversed(entry.path)), overlapped=True)
    found = (*SERIAL.instructions[:at], twice, Wait(entry.target), *SERIAL.instructions[at + 1 :])
    assert ViolationKind.RESHARD_PATH in check(replace(SERIAL, instructions=found)).kinds


JOINED = overlapped(
    SerialSchedule(SPACE.graph, SERIAL, Prices()), Room(check(SERIAL).profile.total_during, None), rule=BucketRule(1.0)
)
BUCKET = next(iter(buckets(JOINED.instructions)))
FIRST_WAIT = waits(JOINED.instructions)[BUCKET.start]


def joined(at, *entries):
    found = JOINED.instructions
    return replace(JOINED, instructions=(*found[:at], *entries, *found[at + 1 :]))


def test_a_bucket_is_one_collective():
    report, parts = check(JOINED), sum(map(len, buckets(JOINED.instructions)))
    assert report.ok, report.violations
    assert report.overlapped_quanta == 100 * (len(STARTS) - parts + len(buckets(JOINED.instructions)))
    assert report.collectives == check(BESIDE).collectives - parts + len(buckets(JOINED.instructions))


def test_copies_of_a_bucket_delay_the_computation():
    parts = [Reshard(2 * k, 2 * k + 1, (("Psum",), ("R",)), overlapped=True, joined=k > 0) for k in range(3)]
    schedule = Schedule((2,), (), (), (*parts, *OPERATORS, *(Wait(part.target) for part in parts)), ())
    run = Streams(schedule, Prices(), lambda value, placement: 0).run
    found = run([30, 40, 30, 60, 60, 0, 0, 0], {0: 20, 5: 30})
    assert found.durations == (20, 0, 0, 60, 60, 30, 0, 0)
    assert (found.overlapped, found.exposed) == (100, 0)
    assert [(beside.start, beside.end) for beside in found.beside] == [(20, 50), (50, 90), (90, 120)]
    late = run([30, 40, 30, 10, 10, 0, 0, 0], {0: 20, 5: 30})
    assert late.durations == (20, 0, 0, 10, 10, 80 + 30, 0, 0), "its first part waits for all of it"


def test_flat_buffers_of_a_bucket_are_counted():
    local_bytes = LocalBytes(SPACE.graph, JOINED.mesh)
    alone = [
        replace(entry, joined=False) if isinstance(entry, Reshard) and entry.joined else entry
        for entry in JOINED.instructions
    ]
    with_buckets, without = (
        check(replace(JOINED, instructions=tuple(entries))).profile.total_during
        for entries in (JOINED.instructions, alone)
    )
    parts = [JOINED.instructions[at] for at in BUCKET]
    sent, received = (
        sum(local_bytes(JOINED.buffers[part.source].value, part.path[end]) for part in parts) for end in (0, 1)
    )
    is_reduced = sent == received
    last = BUCKET.stop - 1
    held = check(JOINED).profile
    targets = sum(after[last] for after in held.after.values())
    assert with_buckets[last] == targets + (0 if is_reduced else sent)
    assert with_buckets[FIRST_WAIT] == sum(after[FIRST_WAIT] for after in held.after.values()) + max(
        received, 0 if is_reduced else sent
    )
    assert (with_buckets >= without).all()


@pytest.mark.parametrize(
    "damage",
    [
        lambda: joined(BUCKET.start, Free(()), replace(JOINED.instructions[BUCKET.start], joined=True)),
        lambda: joined(BUCKET.stop - 1, Free(()), JOINED.instructions[BUCKET.stop - 1]),
        lambda: joined(FIRST_WAIT, JOINED.instructions[FIRST_WAIT], Free(())),
        lambda: joined(BUCKET.stop - 1, replace(JOINED.instructions[BUCKET.stop - 1], overlapped=False)),
    ],
    ids=["nothing before", "apart", "waits apart", "not overlapped"],
)
def test_wrong_buckets_are_found(damage):
    assert ViolationKind.BUCKET in check(damage()).kinds


def test_transfers_of_other_kinds_do_not_join():
    kinds = {
        at: (instruction.path[0][0][0], instruction.path[1][0][0])
        for at, instruction in enumerate(JOINED.instructions)
        if isinstance(instruction, Reshard) and instruction.overlapped
    }
    other = next(at for at in kinds if kinds[at] != kinds[BUCKET.start])
    moved = replace(JOINED.instructions[other], joined=True)
    entries = [entry for at, entry in enumerate(JOINED.instructions) if at != other]
    entries.insert(BUCKET.stop - (other < BUCKET.start), moved)
    assert ViolationKind.BUCKET in check(replace(JOINED, instructions=tuple(entries))).kinds
