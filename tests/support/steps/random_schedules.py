"""Random schedules: activations sent to the host over links of random speed, transfers at random times."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from random import Random

from support.steps.planned_steps import strategy_space, traced_step

from planner.graph.operator_graph import OperatorGraph
from planner.graph.optimizers import optimizer_named
from planner.machine.cluster import LinkSpec, load_cluster
from planner.machine.costs import CostModel
from planner.overlap.transfers import single_steps, transfers
from planner.replay.checker import OptimizerMemory, replay
from planner.replay.memory import LocalBytes
from planner.replay.structure import is_all_reduce
from planner.schedule.frees import with_frees
from planner.schedule.instructions import Buffer, Free, Instruction, Reshard, Schedule, Wait, sends_copy
from planner.scheduling.builder import kept_buffers
from planner.scheduling.offload_limit import DeviceLimit
from planner.scheduling.offload_schedule import offload_candidates, with_offload
from planner.strategies.instruction_costs import InstructionCosts

SGD = OptimizerMemory(optimizer_named("sgd"))


def random_offload(
    name: str, schedule: Schedule, seed: int, share: float = 0.6, link: LinkSpec | None = None
) -> tuple[Schedule, InstructionCosts]:
    """The schedule with about ``share`` of its candidates offloaded, and the prices that it was made for.

    The link is between so slow that every copy is waited for and so fast that none is, if it is not given. Half of
    the time a memory limit below the peak asks for more waiting.
    """
    rng = random.Random(seed)
    space, graph = strategy_space(name, schedule.mesh), traced_step(name).graph
    anything = LinkSpec(latency_seconds=rng.choice([0.0, 1e-6, 2e-5]), bandwidth=rng.choice([1e8, 1e9, 1e10, 1e12]))
    cluster = load_cluster("a100-8-nvlink").model_copy(
        update={"host_link": link or anything, "host_link_shared": rng.random() < 0.3}
    )
    costs = InstructionCosts(graph, CostModel(cluster, schedule.mesh), space.operator_strategies, "adamw")
    candidates = offload_candidates(graph, schedule)
    chosen = [value for value in candidates if rng.random() < share] or candidates[:1]
    memory = replay(graph, schedule, optimizer=SGD, counter_based_random=True)
    limit = DeviceLimit(memory.profile.total_during, int(0.8 * memory.peak_bytes))
    return with_offload(graph, schedule, chosen, costs, limit if rng.random() < 0.5 else None), costs


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
        steps = single_steps(reshard, len(buffers), transfer.owns_source and rng.random() < 0.5)
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


def with_all_reduces(schedule: Schedule) -> Schedule:
    """The schedule with an all-reduce in place of each reduce-scatter with the gather behind it."""

    def direct(entry: Instruction) -> Instruction:
        if not isinstance(entry, Reshard) or not is_all_reduce((entry.path[0], entry.path[-1])):
            return entry
        return replace(entry, path=(entry.path[0], entry.path[-1]))

    return replace(schedule, instructions=tuple(map(direct, schedule.instructions)))


def _copies(graph: OperatorGraph, schedule: Schedule) -> Callable[[Reshard], bool]:
    local_bytes = LocalBytes(graph, schedule.mesh)

    def sends(reshard: Reshard) -> bool:
        (before, after), shapes, _ = local_bytes.along(schedule.buffers[reshard.source].value, reshard.path)
        return sends_copy(before, after, shapes[0])

    return sends
