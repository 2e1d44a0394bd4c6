"""Overlapped collectives in the replay: times by hand, bytes by hand, and every way to be wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.steps.planned_steps import strategy_space

from planner.graph.optimizers import optimizer_named
from planner.machine.cluster import HostCopies
from planner.overlap.timetable import Room, overlapped
from planner.replay.checker import OptimizerMemory, replay
from planner.replay.memory import LocalBytes
from planner.replay.report import ViolationKind
from planner.replay.streams import Slowdowns, Streams
from planner.schedule.instructions import Compute, Free, Reshard, Schedule, Update, Wait, waits
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

    def reshard_quanta(self, value, path):
        return self.collective

    def update_quanta(self, parameter, placement):
        return 1


def check(schedule, prices=None):
    return replay(SPACE.graph, schedule, optimizer=SGD, seconds=prices or Prices(), counter_based_random=True)


BESIDE = overlapped(SPACE.graph, SERIAL, Prices(), Room(check(SERIAL).profile.total_during, None))
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
