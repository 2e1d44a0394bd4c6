"""Random activations sent to the host, over host links of random speed."""

from __future__ import annotations

import random

from support.planned_steps import captured_step, strategy_space

from planner.cluster import LinkSpec, load_cluster
from planner.costs import CostModel
from planner.offload_schedule import offload_candidates, with_offload
from planner.schedule import Schedule
from planner.step_costs import InstructionCosts


def random_offload(name: str, schedule: Schedule, seed: int, share: float = 0.6) -> tuple[Schedule, InstructionCosts]:
    """The schedule with about ``share`` of its candidates offloaded, and the prices that it was made for.

    The link is between so slow that every copy is waited for and so fast that none is.
    """
    rng = random.Random(seed)
    space, graph = strategy_space(name, schedule.mesh), captured_step(name).graph
    link = LinkSpec(latency_seconds=rng.choice([0.0, 1e-6, 2e-5]), bandwidth=rng.choice([1e8, 1e9, 1e10, 1e12]))
    cluster = load_cluster("a100-8-nvlink").model_copy(
        update={"host_link": link, "host_link_shared": rng.random() < 0.3}
    )
    costs = InstructionCosts(graph, CostModel(cluster, schedule.mesh), space.operator_strategies, "adamw")
    candidates = offload_candidates(graph, schedule)
    chosen = [value for value in candidates if rng.random() < share] or candidates[:1]
    return with_offload(graph, schedule, chosen, costs), costs
