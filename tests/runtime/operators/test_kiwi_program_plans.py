"""Plans of KIWI's programs, as published and staged, on four ranks: right, and within their limits."""

from __future__ import annotations

import pytest
import torch
from support.processes.rank_steps import groups_of, local_inputs, one_process, step_errors
from support.steps.planned_steps import step_reference, traced_step
from support.tiers import slow

from planner.machine.cluster import LinkSpec, load_cluster
from planner.session import PlanningSession, PlanRequest
from runtime.operators.executor import lower

NAME, MESH = "mlp", (4,)
SECONDS = 60.0
CHEAP_LINKS = LinkSpec(latency_seconds=0.0, bandwidth=1e12)
"""So that a step this small is sharded."""


def run_on_rank(schedule):
    """Errors against one process."""
    groups = groups_of(schedule.mesh)
    full, loss, expected = one_process(NAME)
    result = lower(schedule, traced_step(NAME), groups, 0, torch.device("cpu")).run(
        local_inputs(full, schedule, groups)
    )
    return step_errors(NAME, schedule, groups, result, loss, expected)


@pytest.mark.parametrize("formulation", ["kiwi_full", slow("kiwi_full_published"), slow("kiwi_reduced_published")])
def test_what_a_program_decides_runs_on_four_ranks(formulation, four_ranks, pool):
    cluster = load_cluster("a100-8-nvlink").model_copy(update={"intra_node": CHEAP_LINKS})
    session = PlanningSession(step_reference(NAME), cluster, MESH)
    free = session.solve(PlanRequest(None, "sharding", time_limit=SECONDS), pool=pool)
    limit = session.execute(free.decision).peak * 9 // 10
    request = PlanRequest(limit + cluster.device.reserve_bytes, formulation, time_limit=SECONDS)
    schedule = session.schedule(session.solve(request, pool=pool).decision, limit)
    assert session.replay(schedule, limit).violations == ()
    for loss, gradient, worst in four_ranks.run(run_on_rank, schedule):
        assert loss <= 1e-5
        assert gradient <= 1e-4, f"gradient of {worst}"
