"""Routes of arguments through views: legal, and as cheap as the cheapest of all routes."""

from __future__ import annotations

from itertools import pairwise

import pytest
from support.steps.planned_steps import strategy_space

from planner.graph.placement import divides, local_numel
from planner.machine.costs import CostModel, to_quanta

MESHES = [(2,), (2, 2)]


def chains_with_targets(space):
    """One (chain, sources, targets) per distinct argument of the step."""
    seen = {}
    for node, strategies in zip(space.nodes, space.strategies, strict=True):
        if node.operator is None:
            continue
        for slot, value in enumerate(space.graph.operators[node.operator].inputs):
            chain = space.chains[value]
            producer = space.node_of_value[chain.base]
            index = space.graph.values[chain.base].output_index
            sources = {strategy.outputs[index] for strategy in space.strategies[producer]}
            targets = {strategy.inputs[slot] for strategy in strategies}
            key = space.router.signature(chain), frozenset(sources), frozenset(targets)
            seen[key] = chain, sorted(sources), sorted(targets)
    return list(seen.values())


def value_at(space, chain, position):
    if position == 0:
        return space.graph.values[chain.base]
    step = chain.steps[position - 1]
    return space.graph.values[space.graph.operators[step.operator].outputs[step.output]]


def view_allows(space, step, before, after):
    return any(
        strategy.inputs[0] == before and strategy.outputs[step.output] == after
        for strategy in space.operator_strategies[step.operator]
    )


def cheapest_by_enumeration(space, resharding, chain, source, target):
    """Nanoseconds of the best of all ways that reshard at most once, by walking through all of them."""
    best = None

    def walk(position, placement, spent):
        nonlocal best
        if position == len(chain.steps) and placement == target and (best is None or (spent or 0) < best):
            best = spent or 0
        if spent is None:
            spec = value_at(space, chain, position).spec
            for other in space.placements_seen[position]:
                path = resharding.path(spec.shape, spec.item_bytes, placement, other, spec.memory_order)
                if path is not None and other != placement:
                    walk(position, other, int(to_quanta(path.seconds)))
        if position < len(chain.steps):
            step = chain.steps[position]
            for strategy in space.operator_strategies[step.operator]:
                if strategy.inputs[0] == placement:
                    walk(position + 1, strategy.outputs[step.output], spent)

    walk(0, source, None)
    return best


class Enumerated:
    """A space with every placement that may occur at the positions of a chain."""

    def __init__(self, space, chain, target):
        self.graph, self.operator_strategies = space.graph, space.operator_strategies
        self.placements_seen = []
        for position in range(len(chain.steps) + 1):
            if position == len(chain.steps):
                self.placements_seen.append({target})
            else:
                step = chain.steps[position]
                self.placements_seen.append({s.inputs[0] for s in space.operator_strategies[step.operator]})


@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["gpt2", "conv_net"])
def test_routes_are_legal_and_their_bytes_are_those_of_the_copy(name, mesh):
    space = strategy_space(name, mesh)
    found = 0
    for chain, sources, targets in chains_with_targets(space):
        for source in sources:
            for target in targets:
                route = space.router.route(chain, source, target)
                if route is None:
                    continue
                found += 1
                assert route.before[0] == source
                at = len(route.before) - 1
                assert (route.path[0] == route.before[-1]) == route.reshards or not route.reshards
                behind = [route.path[-1], *route.after]
                assert behind[-1] == target
                for step, (before, after) in zip(chain.steps[:at], pairwise(route.before), strict=True):
                    assert view_allows(space, step, before, after)
                for step, (before, after) in zip(chain.steps[at:], pairwise(behind), strict=True):
                    assert view_allows(space, step, before, after)
                spec = value_at(space, chain, at).spec
                assert all(divides(spec.shape, placement, mesh) for placement in route.path)
                if route.reshards:
                    assert route.copy_bytes == local_numel(spec.shape, route.path[-1], mesh) * spec.item_bytes
                    assert route.peak_bytes >= route.copy_bytes
                else:
                    assert (route.cost, route.copy_bytes, route.peak_bytes) == (0, 0, 0)
    assert found > 100


@pytest.mark.parametrize("mesh", MESHES)
def test_no_route_is_cheaper_than_the_chosen_one(mesh):
    from planner.machine.cluster import load_cluster

    space = strategy_space("gpt2", mesh)
    resharding = CostModel(load_cluster("a100-8-nvlink"), mesh).resharding
    compared = 0
    for chain, sources, targets in chains_with_targets(space):
        for source in sources[:4]:
            for target in targets[:4]:
                route = space.router.route(chain, source, target)
                best = cheapest_by_enumeration(Enumerated(space, chain, target), resharding, chain, source, target)
                assert (route is None) == (best is None), (chain, source, target)
                if route is not None:
                    assert route.cost == best, (chain, source, target)
                    compared += 1
    assert compared > 100
