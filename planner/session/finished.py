"""The plan file of what a session found: decision, prediction, certificate and notes."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING

from formulations.problem.solution import SolveResult, Status
from formulations.solvers.processes.worker import Ending
from formulations.solvers.protocol.registry import method_of
from planner.graph.operator_graph import ValueRole
from planner.machine.memory_budget import MemoryBudget
from planner.models.references import has_own_batch, planned_model
from planner.plan.decision import Pin, PlanOptions
from planner.plan.document import Certificate, CrossCheck, Plan, Record, make_plan
from planner.plan.notes import INTERRUPTED, cost_note, overlap_notes, planning_notes, sharing_notes
from planner.replay.checker import ReplayReport
from planner.schedule.instructions import Schedule
from planner.session.request import PlanRequest

if TYPE_CHECKING:
    from planner.session.planning import PlanningSession


def plan_of(
    session: PlanningSession,
    request: PlanRequest,
    budget: MemoryBudget,
    result: SolveResult,
    other: SolveResult | None,
    schedule: Schedule,
    report: ReplayReport,
    times: dict[str, float],
    pins: Sequence[Pin] = (),
) -> Plan:
    """Make the plan of a result.

    Parameters
    ----------
    session, request, budget
        The step, what was asked for, and the memory of a device.
    result, other
        What the solvers found, and the bound by a second method.
    schedule, report
        The schedule of the decision, and its replay.
    times
        Seconds per stage.
    pins
        Decisions of the user that the plan keeps.

    Raises
    ------
    PlanError
        The replay refused the schedule, or a bound contradicts it.
    """
    kept = ("the bound is over the plans that keep its pins",) if pins else ()
    if Ending.INTERRUPTED in result.message:
        kept = (*kept, INTERRUPTED)
    return make_plan(
        session.graph,
        schedule,
        report,
        model=planned_model(session.reference, _own_batch(session)),
        options=PlanOptions(
            cluster=session.cluster.name,
            mesh=session.mesh,
            optimizer=session.optimizer.name,
            grad_accum=session.optimizer.micro_batches,
            formulation=request.formulation,
            memory_bytes=budget.device_bytes,
            reserve_bytes=budget.reserve_bytes,
            host_memory_bytes=request.host_memory,
            memory_model=request.counts,
            counter_based_random=True,
            device="cuda" if session.cluster.device_kind == "cuda" else None,
            fused=session.optimizer.fused or None,
            releases_sources=True,
            pins=tuple(pins),
        ),
        fingerprints=session.fingerprints,
        bound_ns=None if result.bound is None else max(0, result.bound),
        record=Record(
            certificate=Certificate(
                solver=result.solver,
                status=result.status,
                seconds=result.seconds,
                proof=result.proof,
                claimed_ns=None if result.claimed is None else max(0, result.claimed),
                claimed_by=result.claimed_by,
                method=method_of(result.proved_by),
                cross_checks=() if other is None else (_cross_check(other),),
            ),
            notes=(
                *kept,
                cost_note(session.instruction_costs.seconds_by_source(schedule)),
                *sharing_notes(session.cluster, session.mesh),
                *overlap_notes(schedule, report),
                *planning_notes(session.graph, schedule, session.space.report, session.instruction_costs),
            ),
            times=times,
            hardware={"machine": platform.machine(), "python": platform.python_version()},
        ),
    )


def _cross_check(other: SolveResult) -> CrossCheck:
    bound = None if other.bound is None else max(0, other.bound)
    status = Status.NO_SOLUTION if bound is None else Status.BOUND_ONLY
    return CrossCheck(solver=other.solver, status=status, bound_ns=bound, seconds=other.seconds)


def _own_batch(session: PlanningSession) -> int | None:
    """Rows of all inputs of a function that takes no batch; None where it takes one, or where they differ."""
    if not has_own_batch(session.reference):
        return None
    inputs = (value for value in map(session.graph.values.__getitem__, session.graph.inputs))
    rows = {value.spec.shape[0] for value in inputs if value.role is ValueRole.INPUT and value.spec.shape}
    return rows.pop() if len(rows) == 1 else None
