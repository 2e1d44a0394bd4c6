"""Overlapped collectives in the replay: times by hand, bytes by hand, and every way to be wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.steps.planned_steps import strategy_space

from planner.graph.optimizers import optimizer_named
from planner.machine.cluster import HostCopies
from planner.overlap.timetable import Room, overlapped
from planner.replay.checker import OptimizerMemory, replay
from planner.replay.report import ViolationKind
from planner.replay.streams import Slowdowns
from planner.schedule.instructions import Free, Reshard, Update, Wait, waits
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


def test_slowdowns_by_hand():
    # One long collective runs beside everything behind its start, which so takes half as long again.
    start = min(STARTS)
    entries = tuple(
        replace(entry, overlapped=False) if isinstance(entry, Reshard) and at != start else entry
        for at, entry in enumerate(BESIDE.instructions)
        if at not in STARTS.values() or at == STARTS[start]
    )
    alone = replace(BESIDE, instructions=entries)
    plain, slow = check(alone, Prices(0)), check(alone, Prices(0, Slowdowns(1500, 1000)))
    assert plain.ok
    assert plain.total_quanta == slow.total_quanta, "a collective that takes no time slows nothing down"


def test_bytes_count_from_start_to_wait():
    report = check(BESIDE)
    for start, wait in STARTS.items():
        entry = BESIDE.instructions[start]
        assert BESIDE.instructions[wait] == Wait(entry.target)
        assert wait > start
    assert report.peak_bytes >= sum(report.profile.at_start.values())


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
