"""Random activations sent to the host, over host links of random speed."""

from __future__ import annotations

import random

from support.steps.planned_steps import strategy_space, traced_step

from planner.graph.optimizers import optimizer_named
from planner.machine.cluster import LinkSpec, load_cluster
from planner.machine.costs import CostModel
from planner.replay.checker import OptimizerMemory, replay
from planner.schedule.instructions import Schedule
from planner.scheduling.offload_limit import DeviceLimit
from planner.scheduling.offload_schedule import offload_candidates, with_offload
from planner.strategies.instruction_costs import InstructionCosts

SGD = OptimizerMemory(optimizer_named("sgd"))


def random_offload(
    name: str, schedule: Schedule, seed: int, share: float = 0.6, link: LinkSpec | None = None
) -> tuple[Schedule, InstructionCosts]:
    """The schedule with about ``share`` of its candidates offloaded, and the prices that it was made for.

    The link is between so slow that every copy is waited for and so fast that none is, if it is not given. Half of
    the time a memory limit below the peak asks for more waiting.
    """
    rng = random.Random(seed)
    space, graph = strategy_space(name, schedule.mesh), traced_step(name).graph
    anything = LinkSpec(latency_seconds=rng.choice([0.0, 1e-6, 2e-5]), bandwidth=rng.choice([1e8, 1e9, 1e10, 1e12]))
    cluster = load_cluster("a100-8-nvlink").model_copy(
        update={"host_link": link or anything, "host_link_shared": rng.random() < 0.3}
    )
    costs = InstructionCosts(graph, CostModel(cluster, schedule.mesh), space.operator_strategies, "adamw")
    candidates = offload_candidates(graph, schedule)
    chosen = [value for value in candidates if rng.random() < share] or candidates[:1]
    memory = replay(graph, schedule, optimizer=SGD, counter_based_random=True)
    limit = DeviceLimit(memory.profile.total_during, int(0.8 * memory.peak_bytes))
    return with_offload(graph, schedule, chosen, costs, limit if rng.random() < 0.5 else None), costs
