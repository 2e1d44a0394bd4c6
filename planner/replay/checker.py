"""The checker of schedules: replays one over its operator graph in exact integers, independent of its maker.

Four passes, each in its own file: each instruction by itself (:mod:`planner.replay.structure`), instructions in
their order (:mod:`planner.replay.order`), the bytes that follow from the lifetimes (:mod:`planner.replay.memory`),
and the time with copies beside the computation (:mod:`planner.replay.clocks`). They are written from the definition
of the schedule alone. They share no code with the builder of schedules or with the models that predict cost and
memory.
"""

from __future__ import annotations

import numpy as np

from planner.graph.operator_graph import OperatorGraph
from planner.replay.clocks import StepCosts, step_time
from planner.replay.memory import (
    LocalBytes,
    OptimizerMemory,
    host_use,
    memory_profile,
    released_on_the_way,
    tensor_lifetimes,
)
from planner.replay.order import OrderedReplay
from planner.replay.report import (
    AliveTensor,
    Category,
    HostUse,
    MemoryProfile,
    ReplayReport,
    Violation,
    ViolationKind,
)
from planner.replay.structure import (
    Strategy,
    StrategyTable,
    communicating_steps,
    meaning_violations,
    shape_violations,
)
from planner.replay.wording import Wording
from planner.schedule.instructions import Compute, Reshard, Schedule

__all__ = [
    "AliveTensor",
    "Category",
    "HostUse",
    "MemoryProfile",
    "OptimizerMemory",
    "ReplayReport",
    "StepCosts",
    "Strategy",
    "StrategyTable",
    "Violation",
    "ViolationKind",
    "lifetimes_of_tensors",
    "replay",
]


def replay(
    graph: OperatorGraph,
    schedule: Schedule,
    *,
    optimizer: OptimizerMemory,
    seconds: StepCosts | None = None,
    limit: int | None = None,
    host_limit: int | None = None,
    allowed: StrategyTable | None = None,
    devices: int | None = None,
    counter_based_random: bool = False,
    device: str = "cpu",
    releases_sources: bool = True,
) -> ReplayReport:
    """Check a schedule, and compute its memory over time and its cost.

    Memory per device is that of torch's tensors: parameters, module buffers, step inputs and optimizer state from
    the start; a storage per buffer of a non-view instruction from its creation until its last alias is freed;
    while an instruction runs, its inputs and outputs together, the peak of a resharding path beside its
    source, the workspace of an update. Host buffers are counted separately.

    Parameters
    ----------
    graph
        The traced step.
    schedule
        The schedule to check.
    optimizer
        State and workspace of the optimizer per trainable parameter.
    seconds
        Costs per instruction, in integer quanta; used only if the schedule is a correct step.
    limit, host_limit
        Bytes that one device may hold, and that may lie in pinned host memory for it.
    allowed
        Verified strategies per operator, views included; None checks no strategy.
    devices
        Number of ranks of the job.
    counter_based_random
        Whether random operators draw numbers that depend on the element alone, so that they may run again.
    device
        Kind of device whose kernels' workspaces are counted, ``cpu`` or ``cuda``.

    releases_sources
        Whether the source of a path of several steps ends with the first of them, where nothing reads it later in any
        plan of the step; plans of earlier versions counted it to the end.

    Returns
    -------
    ReplayReport
        With an empty profile where the schedule is so malformed that bytes have no meaning.
    """
    malformed = tuple(shape_violations(graph, schedule, devices))
    if malformed:
        return _without_profile(malformed)
    violations = list(meaning_violations(graph, schedule, allowed))
    ordered = OrderedReplay(graph, schedule, counter_based_random=counter_based_random)
    lifetimes = ordered.run()
    violations.extend(ordered.violations)
    local_bytes = LocalBytes(graph, schedule.mesh)
    time = None
    if seconds is not None and not violations:
        time, unpriced = step_time(graph, schedule, seconds, local_bytes)
        violations.extend(unpriced)
    profile, peak, at, alive = memory_profile(
        graph, schedule, lifetimes, local_bytes, optimizer, device, releases_sources
    )
    if limit is not None and peak > limit:
        where = Wording(graph, schedule).instruction(schedule.instructions[at]) if at >= 0 else "the start"
        message = f"{peak} bytes at {where}, {peak - limit} more than the limit of {limit}"
        violations.append(Violation(ViolationKind.OVER_LIMIT, at if at >= 0 else None, message))
    host = host_use(schedule, lifetimes, local_bytes)
    if host_limit is not None and host.peak_bytes > host_limit:
        message = f"{host.peak_bytes} bytes on the host, {host.peak_bytes - host_limit} more than {host_limit}"
        violations.append(Violation(ViolationKind.OVER_HOST_LIMIT, host.peak_instruction, message))
    end = len(schedule.instructions)
    violations.sort(key=lambda violation: end if violation.instruction is None else violation.instruction)
    reshards = [instruction for instruction in schedule.instructions if isinstance(instruction, Reshard)]
    return ReplayReport(
        violations=tuple(violations),
        peak_bytes=peak,
        peak_instruction=at,
        alive_at_peak=alive,
        profile=profile,
        host=host,
        total_quanta=None if time is None else time.total,
        stall_quanta=None if time is None else time.stalled,
        hidden_bytes=None if time is None else time.hidden_bytes,
        overlapped_quanta=None if time is None else time.overlapped,
        exposed_quanta=None if time is None else time.exposed,
        recomputed=sum(
            isinstance(instruction, Compute) and instruction.recompute for instruction in schedule.instructions
        ),
        reshards=len(reshards),
        collectives=sum(communicating_steps(entry.path) for entry in reshards if not entry.joined),
    )


def lifetimes_of_tensors(
    graph: OperatorGraph, schedule: Schedule, optimizer: OptimizerMemory, releases_sources: bool = True
) -> list[tuple[AliveTensor, int, int]]:
    """Storages on the device with the instructions that create and free them.

    Parameters
    ----------
    graph, schedule
        A correct schedule of the step.
    optimizer
        State of the optimizer, which lives from before the first instruction (-1) past the last one (their number).
    releases_sources
        As for :func:`replay`.
    """
    lifetimes = OrderedReplay(graph, schedule, counter_based_random=True).run()
    path_ends = released_on_the_way(graph, schedule, lifetimes) if releases_sources else {}
    return tensor_lifetimes(graph, schedule, lifetimes, LocalBytes(graph, schedule.mesh), optimizer, path_ends)


def _without_profile(violations: tuple[Violation, ...]) -> ReplayReport:
    nothing = {category: np.zeros(0, dtype=np.int64) for category in Category}
    profile = MemoryProfile(dict.fromkeys(Category, 0), nothing, nothing)
    return ReplayReport(
        violations=violations,
        peak_bytes=0,
        peak_instruction=-1,
        alive_at_peak=(),
        profile=profile,
        host=HostUse(np.zeros(0, dtype=np.int64), 0, -1, 0, 0),
        total_quanta=None,
        stall_quanta=None,
        hidden_bytes=None,
        overlapped_quanta=None,
        exposed_quanta=None,
        recomputed=0,
        reshards=0,
        collectives=0,
    )
