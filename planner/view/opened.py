"""A plan with what only the traced step knows: prices, lifetimes, and the bytes of every instruction."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from planner.graph.operator_graph import OperatorGraph, ValueRole
from planner.machine.cluster import ClusterSpec
from planner.models.references import reference_of
from planner.plan.document import Plan, schedule_of, verify_plan
from planner.replay.clocks import step_time
from planner.replay.memory import LocalBytes
from planner.replay.report import AliveTensor, ReplayReport
from planner.replay.streams import StepTime
from planner.schedule.instructions import Compute, Instruction, Schedule, creates
from planner.session import PlanningSession, session_of
from planner.view.naming import label_of, module_of
from planner.view.naming import module_of_value as _module_of_value
from planner.view.streams import Interval, intervals_of


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

    def __repr__(self) -> str:
        return f"<{self.name}: {self.plan!r}>"

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
        return intervals_of(self.graph, self.schedule, self.time)

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


def open_plan(
    name: str, plan: Plan, cluster: ClusterSpec | str | None = None, session: PlanningSession | None = None
) -> OpenedPlan:
    """Trace the step of a plan, and verify and replay the plan in it.

    Parameters
    ----------
    name
        Name to show.
    plan
        The plan as it was read; a model that is code has to be allowed before
        (:func:`planner.models.references.check_code`).
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
    of_session = session.cluster.name, session.mesh, session.optimizer.name, session.optimizer.micro_batches
    of_plan = options.cluster, options.mesh, options.optimizer, options.grad_accum
    return session.reference == reference_of(plan.decision.model) and of_session == of_plan
