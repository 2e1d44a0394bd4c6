"""Reductions in place in the replay: storages that they take over, and every way to be wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.steps.planned_steps import plan_of, replicated_decision, strategy_space
from support.steps.random_schedules import with_all_reduces

from planner.graph.optimizers import optimizer_named
from planner.machine.cluster import load_cluster
from planner.machine.costs import CostModel
from planner.overlap.serial import SerialSchedule
from planner.overlap.timetable import Room, overlapped
from planner.plan.document import schedule_of
from planner.replay.checker import OptimizerMemory, replay
from planner.replay.memory import LocalBytes
from planner.replay.report import ViolationKind
from planner.schedule.instructions import Free, Wait, waits
from planner.schedule.storage_uses import StorageUses
from planner.scheduling.builder import build_schedule
from planner.strategies.instruction_costs import InstructionCosts

SPACE = strategy_space("gpt2", (2,))
LOCAL_BYTES = LocalBytes(SPACE.graph, (2,))
SGD = OptimizerMemory(optimizer_named("sgd"))
COSTS = InstructionCosts(SPACE.graph, CostModel(load_cluster("a100-8-nvlink"), (2,)), SPACE.operator_strategies, "sgd")


def check(schedule):
    return replay(SPACE.graph, schedule, optimizer=SGD, seconds=COSTS, counter_based_random=True)


SERIAL = with_all_reduces(build_schedule(SPACE, replicated_decision(SPACE, 0)))
BESIDE = overlapped(SerialSchedule(SPACE.graph, SERIAL, COSTS), Room(check(SERIAL).profile.total_during, None))
WAITS = waits(BESIDE.instructions)
REDUCTIONS = [at for at in WAITS if BESIDE.instructions[at].in_place]
AT = max(REDUCTIONS, key=lambda at: LOCAL_BYTES(BESIDE.buffers[BESIDE.instructions[at].target].value, (("R"),)))
REDUCED = BESIDE.instructions[AT]


def changed(at, *entries):
    found = BESIDE.instructions
    return replace(BESIDE, instructions=(*found[:at], *entries, *found[at + 1 :]))


def test_gradients_that_nothing_else_reads_are_reduced_in_place():
    assert check(BESIDE).ok
    starts = [BESIDE.instructions[at] for at in WAITS]
    assert len(REDUCTIONS) == sum(entry.path == (("Psum",), ("R",)) for entry in starts)
    assert len(REDUCTIONS) > 10


def test_a_plan_keeps_them():
    assert schedule_of(plan_of("gpt2", BESIDE, COSTS, "sgd"), SPACE.graph) == BESIDE


def test_the_target_takes_the_storage_of_the_source():
    """Less memory by the target's bytes where both were there, and the time of the collective without a copy."""
    copied = changed(AT, replace(REDUCED, in_place=False))
    entry = BESIDE.buffers[REDUCED.target]
    nbytes = LOCAL_BYTES(entry.value, entry.placement)
    before, after = (check(schedule).profile.total_during for schedule in (copied, BESIDE))
    assert before[AT] - after[AT] == nbytes
    assert (before >= after).all()
    assert before[-1] == after[-1]
    assert check(copied).overlapped_quanta > check(BESIDE).overlapped_quanta
    uses = StorageUses(SPACE.graph, BESIDE)
    assert uses.root[REDUCED.target] == uses.root[REDUCED.source]


def kept_until_the_wait(*entries, buffers=()):
    """The source of the reduction stays, and entries come before the wait for its end."""
    found = list(BESIDE.instructions)
    freed = next(at for at, entry in enumerate(found) if isinstance(entry, Free) and REDUCED.source in entry.buffers)
    wait = WAITS[AT]
    found[wait : wait + 1] = [*entries, found[wait], Free((REDUCED.source,))]
    found[freed] = Free(tuple(buffer for buffer in found[freed].buffers if buffer != REDUCED.source))
    return replace(BESIDE, instructions=tuple(found), buffers=(*BESIDE.buffers, *buffers))


def again(**options):
    """The source is reduced once more while the first reduction changes it."""
    target = len(BESIDE.buffers)
    more = replace(REDUCED, target=target, **options), Wait(target), Free((target,))
    return kept_until_the_wait(*more, buffers=(BESIDE.buffers[REDUCED.target],))


def of_an_input():
    """A parameter is reduced, as if it were the source."""
    parameter, target = BESIDE.inputs[0], len(BESIDE.buffers)
    more = replace(REDUCED, source=parameter, target=target), Wait(target), Free((target,))
    return replace(
        BESIDE,
        buffers=(*BESIDE.buffers, BESIDE.buffers[REDUCED.target]),
        instructions=(*more, *BESIDE.instructions),
    )


def gather_in_place():
    at = next(at for at, entry in enumerate(BESIDE.instructions) if at in WAITS and at not in REDUCTIONS)
    return changed(at, replace(BESIDE.instructions[at], in_place=True))


def in_a_bucket():
    later = next(at for at in REDUCTIONS if at != AT)
    moved = replace(BESIDE.instructions[later], joined=True, in_place=False)
    entries = [entry for at, entry in enumerate(BESIDE.instructions) if at != later]
    entries.insert(AT + (later > AT), moved)
    return replace(BESIDE, instructions=tuple(entries))


def test_a_source_may_stay_unread():
    assert check(kept_until_the_wait()).ok


@pytest.mark.parametrize(
    "damage",
    [
        again,
        lambda: again(in_place=False),
        of_an_input,
        gather_in_place,
        in_a_bucket,
        lambda: changed(AT, replace(REDUCED, overlapped=False)),
    ],
    ids=["twice", "read again", "of an input", "a gather", "in a bucket", "not overlapped"],
)
def test_wrong_reductions_in_place_are_found(damage):
    assert ViolationKind.IN_PLACE in check(damage()).kinds
