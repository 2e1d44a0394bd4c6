"""A plan held against the step as traced where it is to run, before anything is allocated."""

from __future__ import annotations

from math import prod

from planner.common.units import format_bytes
from planner.plan.document import Plan, schedule_of, verify_plan
from planner.schedule.instructions import Schedule
from planner.strategies.traced_step import TracedStep
from runtime.job.process_group import LaunchError
from runtime.measure.host_arena import host_lifetimes, plan_arena


def check_ranks(plan: Plan, ranks: int) -> None:
    """Refuse a job of another number of ranks than the plan's mesh has.

    Raises
    ------
    LaunchError
        The job has too few or too many ranks.
    """
    mesh = plan.decision.options.mesh
    if prod(mesh) != ranks:
        name = "x".join(map(str, mesh))
        raise LaunchError(f"the plan is for mesh {name}, {prod(mesh)} ranks, the job has {ranks}: start {prod(mesh)}")


def checked_schedule(plan: Plan, traced: TracedStep, ranks: int) -> Schedule:
    """Schedule of a plan that a replay on the traced step finds correct and as predicted.

    Raises
    ------
    PlanError
        The plan is of another step, is no correct step, or differs from its prediction.
    LaunchError
        Its host buffers do not fit into one block of the host memory that it was planned for.
    """
    here = plan.decision.fingerprints.model_copy(update={"graph": traced.fingerprint})
    verify_plan(plan, traced.graph, here, devices=ranks)
    schedule = schedule_of(plan, traced.graph)
    options = plan.decision.options
    if options.device == "cuda" and options.host_memory_bytes is not None:
        pinned = plan_arena(host_lifetimes(traced.graph, schedule)).nbytes
        if pinned > options.host_memory_bytes:
            raise LaunchError(
                f"the plan's offloaded tensors need one block of {format_bytes(pinned)} of pinned memory, gaps between "
                f"them included; it was planned for {format_bytes(options.host_memory_bytes)}: plan with a "
                "--host-memory that is less by the difference"
            )
    return schedule
