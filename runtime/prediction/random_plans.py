"""Random plans of a step: a sample to compare predicted with measured times on."""

from __future__ import annotations

from collections.abc import Iterator

from formulations.problem.solution import Status
from planner.models.references import planned_model
from planner.plan.document import Certificate, Plan, PlanOptions, Record, make_plan
from planner.plan.notes import cost_note
from planner.session import PlanningSession
from planner.strategies.random_decision import random_decision

FORMULATION = SOLVER = "random"
"""Names in the plans, which no solver made."""


def random_plans(session: PlanningSession, count: int, seed: int = 0) -> Iterator[Plan]:
    """Plans with random layouts and recomputation, replayed and without a memory limit; certified by nobody.

    Parameters
    ----------
    session
        The step, mesh and cluster.
    count
        Number of plans.
    seed
        The same plans for the same seed.
    """
    for number in range(count):
        schedule = session.schedule(random_decision(session.space, seed + number))
        yield make_plan(
            session.graph,
            schedule,
            session.replay(schedule),
            model=planned_model(session.reference),
            options=PlanOptions(
                cluster=session.cluster.name,
                mesh=session.mesh,
                optimizer=session.optimizer.name,
                formulation=FORMULATION,
                counter_based_random=True,
                device="cuda" if session.cluster.device_kind == "cuda" else None,
                fused=session.optimizer.fused or None,
                releases_sources=True,
            ),
            fingerprints=session.fingerprints,
            bound_ns=None,
            record=Record(
                certificate=Certificate(solver=SOLVER, status=Status.FEASIBLE, seconds=0.0),
                notes=(cost_note(session.instruction_costs.seconds_by_source(schedule)),),
            ),
        )
