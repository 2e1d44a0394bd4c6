"""Random plans of a step: a sample to compare predicted with measured times on."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

from formulations.problem.solution import Status
from formulations.step.training_step import StepDecision
from planner.models.references import planned_model
from planner.plan.document import Certificate, Plan, PlanOptions, Record, make_plan
from planner.plan.notes import cost_note
from planner.session import PlanningSession
from planner.strategies.random_decision import random_decision

MOST_RECOMPUTED = 0.5
"""Largest probability that an operator of a random plan runs again."""

FORMULATION = SOLVER = "random"
"""Names in the plans, which no solver made."""


def random_plans(session: PlanningSession, count: int, seed: int = 0) -> Iterator[Plan]:
    """Plans with random layouts and recomputation, replayed and without a memory limit; certified by nobody.

    Each has its own care (:func:`planner.strategies.random_decision.random_decision`) and its own share of operators
    that run again, so that fast and slow plans are among them.

    Parameters
    ----------
    session
        The step, mesh and cluster.
    count
        Number of plans.
    seed
        The same plans for the same seed.
    """
    for number in range(seed, seed + count):
        rng = random.Random(number)
        care, share = rng.random(), rng.uniform(0.0, MOST_RECOMPUTED)
        yield _plan(session, random_decision(session.space, number, share, care=care))


def covering_plans(session: PlanningSession, count: int, seed: int = 0) -> Iterator[Plan]:
    """Random plans that use many different instructions: every layout is one that the plans before used the least.

    Layouts count as one where their operators have the same signature (:mod:`planner.machine.known_costs`), so equal
    layers of a model have different ones in one plan.

    Parameters
    ----------
    session, count, seed
        As for :func:`random_plans`; there are fewer plans where no operator has an unused layout.
    """
    space = session.space
    uses: Counter[object] = Counter()
    keys = [
        [
            (i, layout)
            if node.operator is None
            else session.costs.operator_signature(session.graph, session.graph.operators[node.operator], strategy)
            for layout, strategy in enumerate(strategies)
        ]
        for i, (node, strategies) in enumerate(zip(space.nodes, space.strategies, strict=True))
    ]

    def rank(node: int, layout: int) -> int:
        return uses[keys[node][layout]]

    for number in range(count):
        known = len(uses)
        decision = random_decision(space, seed + number, rank=rank)
        uses.update(keys[node][layout] for node, layout in enumerate(decision.layouts))
        if len(uses) == known:
            return
        yield _plan(session, decision)


def _plan(session: PlanningSession, decision: StepDecision) -> Plan:
    schedule = session.schedule(decision)
    return make_plan(
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
