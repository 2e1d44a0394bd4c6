"""A plan with what only the traced step knows: prices, lifetimes, and the bytes of every instruction."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.graph.operator_graph import OperatorGraph, Phase, ValueRole
from planner.machine.cluster import ClusterSpec
from planner.models.references import reference_of
from planner.plan.document import Plan, schedule_of, verify_plan
from planner.replay.clocks import step_time
from planner.replay.memory import LocalBytes
from planner.replay.report import AliveTensor, ReplayReport
from planner.replay.streams import INWARD, OUTWARD, StepTime
from planner.replay.structure import communicating_axes
from planner.schedule.instructions import Compute, Free, Instruction, Reshard, Schedule, Wait, creates
from planner.session import PlanningSession, session_of
from planner.view.naming import COPY_IN, COPY_OUT, LOCAL_RESHARD, UPDATE, kind_of, label_of, module_of
from planner.view.naming import module_of_value as _module_of_value

FORWARD, BACKWARD, AGAIN = "forward", "backward", "recomputed"
BLOCKING, BESIDE, STALL = "collective, awaited", "collective, overlapped", "waiting"
GROUPS = (FORWARD, BACKWARD, AGAIN, UPDATE, LOCAL_RESHARD, BLOCKING, BESIDE, COPY_OUT, COPY_IN, STALL)
"""Groups of instructions on a timeline, in the order of a legend."""
COMPUTATION = "computation"


@dataclass(frozen=True, slots=True)
class Interval:
    """An instruction on a stream, in nanoseconds since the start of the step."""

    stream: str
    group: str
    start: int
    end: int
    instruction: int


@dataclass(frozen=True, eq=False)
class OpenedPlan:
    """A verified plan in its session.

    Parameters
    ----------
    name
        Name to show, such as that of its file.
    plan
        The plan.
    session
        The step, mesh and cluster that it was made for.
    schedule, report, time
        Its schedule, the replay of it, and the times of its instructions.
    """

    name: str
    plan: Plan
    session: PlanningSession
    schedule: Schedule
    report: ReplayReport
    time: StepTime

    @property
    def graph(self) -> OperatorGraph:
        """The traced step."""
        return self.session.graph

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """(instructions + 1,) nanoseconds at which each instruction starts on the computation's stream, and the end."""
        return np.concatenate(([0], np.cumsum(np.array(self.time.durations, dtype=np.int64))))

    @cached_property
    def created_bytes(self) -> tuple[int, ...]:
        """Bytes on one device of the buffers that each instruction creates; 0 for views, which own none."""
        local = LocalBytes(self.graph, self.session.mesh)
        buffers = self.schedule.buffers

        def created(entry: Instruction) -> int:
            if isinstance(entry, Compute) and self.graph.operators[entry.operator].is_view:
                return 0
            return sum(local(buffers[buffer].value, buffers[buffer].placement) for buffer in creates(entry))

        return tuple(map(created, self.schedule.instructions))

    @cached_property
    def intervals(self) -> tuple[Interval, ...]:
        """What runs when and on which stream; what takes no time is left out."""
        found = []
        for at, (entry, start, length) in enumerate(
            zip(self.schedule.instructions, self.starts.tolist()[:-1], self.time.durations, strict=True)
        ):
            if length:
                group = self.group(entry)
                axes = communicating_axes(entry.path) if isinstance(entry, Reshard) and group == BLOCKING else ()
                streams = dict.fromkeys(map(link_name, axes)) or (COMPUTATION,)
                found += [Interval(stream, group, start, start + length, at) for stream in streams]
        for beside in self.time.beside:
            group = {OUTWARD: COPY_OUT, INWARD: COPY_IN}.get(beside.link, BESIDE)
            found.append(Interval(link_name(beside.link), group, beside.start, beside.end, beside.instruction))
        return tuple(found)

    def group(self, entry: Instruction) -> str:
        """Group of :data:`GROUPS` of an instruction on the computation's stream."""
        match entry:
            case Compute(operator, recompute=recompute):
                return AGAIN if recompute else self._phase(operator)
            case Reshard(path=path):
                return BLOCKING if communicating_axes(path) else LOCAL_RESHARD
            case Wait() | Free():
                return STALL
        kind = kind_of(self.graph, entry)
        return kind if kind == UPDATE else STALL  # a copy that the computation waits for

    def _phase(self, operator: int) -> str:
        return FORWARD if self.graph.operators[operator].phase is Phase.FORWARD else BACKWARD

    def kind(self, entry: Instruction) -> str:
        """Kind of an instruction by what the computation's stream spends on it."""
        kind = kind_of(self.graph, entry)
        return "wait for a copy" if isinstance(entry, Free) or kind in (COPY_OUT, COPY_IN) else kind

    def label(self, at: int) -> str:
        """Name of an instruction by its position."""
        return label_of(self.graph, self.schedule, self.schedule.instructions[at])

    def module(self, at: int) -> str:
        """Path of the module of an instruction by its position."""
        return module_of(self.graph, self.schedule, self.schedule.instructions[at])

    def module_of_tensor(self, tensor: AliveTensor) -> str:
        """Path of the module that a tensor alive at the peak belongs to."""
        if tensor.buffer is not None:
            return _module_of_value(self.graph, self.graph.values[self.schedule.buffers[tensor.buffer].value])
        parameter = tensor.name.rpartition(" state of ")[2]
        if parameter in self._parameters:
            return parameter.rpartition(".")[0]
        return self.module(self.report.peak_instruction)

    @cached_property
    def _parameters(self) -> frozenset[str]:
        return frozenset(value.name for value in self.graph.values if value.role is ValueRole.PARAMETER)


def link_name(link: int) -> str:
    """Stream of a mesh axis, or of copies to or from the host."""
    return {OUTWARD: "to the host", INWARD: "from the host"}.get(link, f"link of axis {link}")


def open_plan(
    name: str, plan: Plan, cluster: ClusterSpec | str | None = None, session: PlanningSession | None = None
) -> OpenedPlan:
    """Trace the step of a plan, and verify and replay the plan in it.

    Parameters
    ----------
    name
        Name to show.
    plan
        The plan as it was read; loading its model executes code where it is a ``module.path:function``.
    cluster
        The cluster where it is not known by name.
    session
        Session of another plan, used where it is of the same step, mesh, optimizer and cluster.

    Raises
    ------
    PlanError
        The plan was made for something else or does not hold.
    ValueError
        The model or the cluster cannot be loaded.
    """
    if session is None or not _is_session_of(session, plan):
        session = session_of(plan, cluster)
    costs = session.instruction_costs
    report = verify_plan(plan, session.graph, session.fingerprints, seconds=costs, allowed=session.allowed_strategies)
    schedule = schedule_of(plan, session.graph)
    time, _ = step_time(session.graph, schedule, costs, LocalBytes(session.graph, session.mesh))
    assert time is not None, "a verified plan has a price for every instruction"
    return OpenedPlan(name, plan, session, schedule, report, time)


def _is_session_of(session: PlanningSession, plan: Plan) -> bool:
    options = plan.decision.options
    return session.reference == reference_of(plan) and (session.cluster.name, session.mesh, session.optimizer.name) == (
        options.cluster,
        options.mesh,
        options.optimizer,
    )
