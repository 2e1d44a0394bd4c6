"""Timetables drawn at random: every start and wait of a transfer at any place where it is lawful."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from random import Random

from planner.graph.operator_graph import OperatorGraph
from planner.overlap.transfers import single_steps, transfers
from planner.replay.memory import LocalBytes
from planner.schedule.frees import with_frees
from planner.schedule.instructions import Buffer, Free, Instruction, Reshard, Schedule, Wait, sends_copy
from planner.scheduling.builder import kept_buffers


def random_timetable(graph: OperatorGraph, schedule: Schedule, rng: Random) -> Schedule:
    """The schedule with its transfers beside the computation, each from and to where chance has it."""
    moved = transfers(graph, schedule)
    inside = {at for transfer in moved for at in transfer.positions}
    entries = schedule.instructions
    kept = [at for at, entry in enumerate(entries) if at not in inside and not isinstance(entry, Free)]
    buffers = list(schedule.buffers)
    placed: list[tuple[float, Instruction]] = [(float(at), entries[at]) for at in kept]
    for transfer in moved:
        reshard = entries[transfer.reshard]
        assert isinstance(reshard, Reshard)
        steps = single_steps(schedule, reshard, len(buffers))
        buffers += [Buffer(schedule.buffers[reshard.source].value, step.path[-1]) for step in steps[:-1]]
        events = [entries[at] for at in transfer.before]
        for step in steps:
            events += [step, Wait(step.target)] if step.overlapped else [step]
        events += [entries[at] for at in transfer.behind]
        earliest = 0 if transfer.is_gather else min(transfer.positions)
        first, last = earliest - 0.5, transfer.needed - 0.25
        places = [first] * len(events) if rng.random() < 0.3 else sorted(rng.uniform(first, last) for _ in events)
        if rng.random() < 0.5:  # a last wait as late as it may be hides most
            at = max(k for k, event in enumerate(events) if isinstance(event, Wait))
            places[at:] = [last] * (len(events) - at)
        placed += zip(places, events, strict=True)
    placed.sort(key=lambda pair: pair[0])
    kept_alive = kept_buffers(graph, schedule.inputs, schedule.results)
    written = replace(schedule, buffers=tuple(buffers))
    instructions = with_frees([entry for _, entry in placed], kept_alive, _copies(graph, written))
    return replace(written, instructions=instructions)


def _copies(graph: OperatorGraph, schedule: Schedule) -> Callable[[Reshard], bool]:
    local_bytes = LocalBytes(graph, schedule.mesh)

    def sends(reshard: Reshard) -> bool:
        (before, after), shapes, _ = local_bytes.along(schedule.buffers[reshard.source].value, reshard.path)
        return sends_copy(before, after, shapes[0])

    return sends
