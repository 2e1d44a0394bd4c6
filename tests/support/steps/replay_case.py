"""The step of two layers and its correct schedule, as the tests of the replay change them."""

from __future__ import annotations

from dataclasses import replace

from support.steps.hand_graphs import two_layer_graph, two_layer_schedule, used_strategies

from planner.graph.optimizers import optimizer_named
from planner.replay.checker import OptimizerMemory, replay

ADAMW = OptimizerMemory(optimizer_named("adamw", fused=False))
SGD = OptimizerMemory(optimizer_named("sgd"))
GRAPH = two_layer_graph()
SCHEDULE = two_layer_schedule(GRAPH)
RULES = used_strategies(GRAPH, SCHEDULE)


class Prices:
    """Prices that tell every instruction apart."""

    def compute_quanta(self, operator, outputs, inputs):
        return 1000 + operator

    def reshard_quanta(self, value, path, in_place):
        return 10 * len(path)

    def update_quanta(self, parameter, placement):
        return 1


def check(schedule, graph=GRAPH, optimizer=ADAMW, **options):
    return replay(graph, schedule, optimizer=optimizer, **{"allowed": RULES.__getitem__, **options})


def with_instruction(at, instruction):
    changed = list(SCHEDULE.instructions)
    changed[at] = instruction
    return replace(SCHEDULE, instructions=tuple(changed))


def moved(at, to):
    changed = list(SCHEDULE.instructions)
    changed.insert(to, changed.pop(at))
    return replace(SCHEDULE, instructions=tuple(changed))
