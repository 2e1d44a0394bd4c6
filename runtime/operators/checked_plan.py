"""A plan held against the step as traced where it is to run, before anything is allocated."""

from __future__ import annotations

from math import prod

from planner.plan.document import Plan, schedule_of, verify_plan
from planner.schedule.instructions import Schedule
from planner.strategies.traced_step import TracedStep
from runtime.job.process_group import LaunchError


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
    """
    here = plan.decision.fingerprints.model_copy(update={"graph": traced.fingerprint})
    verify_plan(plan, traced.graph, here, devices=ranks)
    return schedule_of(plan, traced.graph)
