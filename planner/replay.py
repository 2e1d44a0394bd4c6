"""The checker of schedules: replays one over its operator graph in exact integers and trusts nothing.

Three passes, each in its own file: what an instruction says by itself (:mod:`planner.replay_structure`), what
instructions mean in their order (:mod:`planner.replay_order`), and the bytes that follow from the lifetimes
(:mod:`planner.replay_memory`). They are written from the definition of the schedule alone and share no code
with what builds schedules or with the models that promise their cost and memory.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from planner.operator_graph import OperatorGraph
from planner.placement import Placement
from planner.replay_memory import LocalBytes, OptimizerMemory, memory_profile
from planner.replay_order import OrderedReplay
from planner.replay_report import (
    AliveTensor,
    Category,
    MemoryProfile,
    ReplayReport,
    Violation,
    ViolationKind,
)
from planner.replay_structure import (
    Strategy,
    StrategyTable,
    communicating_steps,
    meaning_violations,
    shape_violations,
    strategy_of,
)
from planner.replay_wording import Wording
from planner.schedule import Compute, Instruction, Reshard, Schedule, Update

__all__ = [
    "AliveTensor",
    "Category",
    "MemoryProfile",
    "OptimizerMemory",
    "ReplayReport",
    "StepCosts",
    "Strategy",
    "StrategyTable",
    "Violation",
    "ViolationKind",
    "replay",
]


class StepCosts(Protocol):
    """Costs in an integer quantum of time; views cost nothing and are not asked for.

    Each method raises KeyError for what it has no price for.
    """

    def compute_quanta(
        self, operator: int, outputs: tuple[Placement | None, ...], inputs: tuple[Placement, ...]
    ) -> int:
        """Cost of one execution of an operator under these placements."""

    def reshard_quanta(self, value: int, path: tuple[Placement, ...]) -> int:
        """Cost of a resharding path of a value."""

    def update_quanta(self, parameter: int, placement: Placement) -> int:
        """Cost of the optimizer step of a parameter, by value index."""


def replay(
    graph: OperatorGraph,
    schedule: Schedule,
    *,
    optimizer: OptimizerMemory,
    seconds: StepCosts | None = None,
    limit: int | None = None,
    allowed: StrategyTable | None = None,
    devices: int | None = None,
    counter_based_random: bool = False,
) -> ReplayReport:
    """Check a schedule, and say what it holds at every moment and what it costs.

    Memory per device is what torch holds: parameters, module buffers, step inputs and optimizer state from
    the start; a storage per buffer of a non-view instruction from its creation until its last alias is freed;
    while an instruction runs, its inputs and outputs together, the peak of a resharding path beside its
    source, the workspace of an update.

    Parameters
    ----------
    graph
        The captured step.
    schedule
        What to replay.
    optimizer
        What the optimizer holds per trainable parameter.
    seconds
        Costs per instruction, in integer quanta; asked only of a schedule that is a correct step.
    limit
        Bytes that one device may hold.
    allowed
        Verified strategies per operator, views included; None checks no strategy.
    devices
        Number of ranks of the job.
    counter_based_random
        Whether random operators draw numbers that depend on the element alone, so that they may run again.

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
    total = None
    if seconds is not None and not violations:
        total, unpriced = _total_quanta(graph, schedule, seconds)
        violations.extend(unpriced)
    local_bytes = LocalBytes(graph, schedule.mesh)
    profile, peak, at, alive = memory_profile(graph, schedule, lifetimes, local_bytes, optimizer)
    if limit is not None and peak > limit:
        where = Wording(graph, schedule).instruction(schedule.instructions[at]) if at >= 0 else "the start"
        message = f"{peak} bytes at {where}, {peak - limit} more than the limit of {limit}"
        violations.append(Violation(ViolationKind.OVER_LIMIT, at if at >= 0 else None, message))
    end = len(schedule.instructions)
    violations.sort(key=lambda violation: end if violation.instruction is None else violation.instruction)
    reshards = [instruction for instruction in schedule.instructions if isinstance(instruction, Reshard)]
    return ReplayReport(
        violations=tuple(violations),
        peak_bytes=peak,
        peak_instruction=at,
        alive_at_peak=alive,
        profile=profile,
        total_quanta=total,
        recomputed=sum(
            isinstance(instruction, Compute) and instruction.recompute for instruction in schedule.instructions
        ),
        reshards=len(reshards),
        collectives=sum(communicating_steps(instruction.path) for instruction in reshards),
    )


def _total_quanta(
    graph: OperatorGraph, schedule: Schedule, costs: StepCosts
) -> tuple[int | None, tuple[Violation, ...]]:
    """Sum of the costs of all instructions; None and violations where one has no price."""
    words = Wording(graph, schedule)
    total, unpriced = 0, []
    for at, instruction in enumerate(schedule.instructions):
        try:
            total += _quanta(graph, schedule, costs, instruction)
        except KeyError:
            message = f"{words.instruction(instruction)} has no price under its placements"
            unpriced.append(Violation(ViolationKind.UNPRICED, at, message))
    return (None if unpriced else total), tuple(unpriced)


def _quanta(graph: OperatorGraph, schedule: Schedule, costs: StepCosts, instruction: Instruction) -> int:
    match instruction:
        case Compute(operator) if not graph.operators[operator].is_view:
            return costs.compute_quanta(operator, *strategy_of(schedule, instruction))
        case Reshard(source, _, path):
            return costs.reshard_quanta(schedule.buffers[source].value, path)
        case Update(parameter):
            buffer = schedule.buffers[parameter]
            return costs.update_quanta(buffer.value, buffer.placement)
    return 0


def _without_profile(violations: tuple[Violation, ...]) -> ReplayReport:
    nothing = {category: np.zeros(0, dtype=np.int64) for category in Category}
    profile = MemoryProfile(dict.fromkeys(Category, 0), nothing, nothing)
    return ReplayReport(
        violations=violations,
        peak_bytes=0,
        peak_instruction=-1,
        alive_at_peak=(),
        profile=profile,
        total_quanta=None,
        recomputed=0,
        reshards=0,
        collectives=0,
    )
