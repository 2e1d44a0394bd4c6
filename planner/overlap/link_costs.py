"""Time for which resharding keeps the link of each mesh axis busy, as tables beside those of its cost.

Gathers and reductions may share a collective with others, so theirs is the least share that they can have in it: no
latency, and no copies (:meth:`planner.machine.resharding.ReshardPlanner.least_seconds`).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np

from formulations.problem.strategy_problem import IntArray
from formulations.step.training_step import StepModel
from formulations.step.weights import is_gather
from planner.graph.operator_graph import OutputRole
from planner.graph.placement import Placement, local_numel, reordered
from planner.graph.view_chains import ViewChain
from planner.machine.costs import CostModel
from planner.machine.resharding import BUCKETED, step_between
from planner.strategies.space import StrategySpace

NANOSECONDS = 1e9


def with_link_costs(space: StrategySpace, costs: CostModel) -> StepModel:
    """The tables of a space, with the time on each link of every argument and gradient, rounded down.

    Parameters
    ----------
    space
        Strategies and tables of a step.
    costs
        Cost model of the same mesh.
    """
    tables = _LinkTables(space, costs)
    edges = []
    for edge in space.model.edges:
        operator = space.nodes[edge.consumer].operator
        assert operator is not None, "operators read arguments"
        chain = space.chains[space.graph.operators[operator].inputs[edge.slot]]
        targets = tuple(strategy.inputs[edge.slot] for strategy in space.strategies[edge.consumer])
        sources = _outputs(space, edge.producer, edge.output)
        edges.append(replace(edge, link_cost=tables.of(chain, sources, targets, is_gather(space.model, edge))))
    outputs = [output for output in space.graph.outputs if output.role is OutputRole.GRADIENT]
    gradients = []
    for gradient, output in zip(space.model.gradients, outputs, strict=True):
        sources = _outputs(space, gradient.producer, gradient.output)
        targets = _outputs(space, gradient.parameter, 0)
        link_cost = tables.of(space.chains[output.value], sources, targets, is_shared=True)
        gradients.append(replace(gradient, link_cost=link_cost))
    return replace(space.model, edges=tuple(edges), gradients=tuple(gradients))


def _outputs(space: StrategySpace, node: int, output: int) -> tuple[Placement, ...]:
    """Placement of an output under each layout of its node."""
    found = []
    for strategy in space.strategies[node]:
        placement = strategy.outputs[output]
        assert placement is not None, "an output that is read has a placement"
        found.append(placement)
    return tuple(found)


class _LinkTables:
    """Tables by chain and placements; equal ones are shared."""

    def __init__(self, space: StrategySpace, costs: CostModel) -> None:
        self._space, self._costs = space, costs
        self._tables: dict[object, IntArray] = {}
        self._times: dict[object, tuple[int, ...]] = {}

    def of(
        self, chain: ViewChain, sources: tuple[Placement, ...], targets: tuple[Placement, ...], is_shared: bool
    ) -> IntArray:
        """Nanoseconds per axis and pair of layouts, shape ``(axes, sources, targets)``."""
        signature = self._space.router.signature(chain), is_shared
        key = (signature, sources, targets)
        if key not in self._tables:
            found = {
                (source, target): self._busy(signature, chain, source, target, is_shared)
                for source in dict.fromkeys(sources)
                for target in dict.fromkeys(targets)
            }
            table = np.array([[found[source, target] for target in targets] for source in sources], dtype=np.int64)
            self._tables[key] = np.ascontiguousarray(table.transpose(2, 0, 1))
        return self._tables[key]

    def _busy(
        self, signature: object, chain: ViewChain, source: Placement, target: Placement, is_shared: bool
    ) -> tuple[int, ...]:
        key = (signature, source, target)
        if key not in self._times:
            self._times[key] = self._busy_on_route(chain, source, target, is_shared)
        return self._times[key]

    def _busy_on_route(
        self, chain: ViewChain, source: Placement, target: Placement, is_shared: bool
    ) -> tuple[int, ...]:
        busy = [0.0] * len(self._space.mesh)
        route = self._space.router.route(chain, source, target)
        if route is not None and route.reshards:
            graph = self._space.graph
            views = chain.steps[: len(route.before) - 1]
            value = chain.base
            for view in views:
                seen = graph.operators[view.operator].outputs[view.output]
                assert seen is not None, "a chain follows tensors"
                value = seen
            spec = graph.values[value].spec
            shape = tuple(spec.shape[dim] for dim in spec.memory_order)
            lying = [reordered(placement, spec.memory_order) for placement in route.path]
            for at, (before, after) in enumerate(pairwise(lying)):
                step = step_between(before, after)
                if step is None or step.collective is None:
                    continue
                resharding = self._costs.resharding
                if is_shared and step.collective in BUCKETED:
                    sent, received = (local_numel(shape, ends, resharding.mesh) for ends in (before, after))
                    seconds = resharding.least_seconds(step, sent * spec.item_bytes, received * spec.item_bytes)
                else:
                    seconds = resharding.step_seconds(shape, spec.item_bytes, before, after, owned=at > 0)
                busy[step.axis] += seconds
        # Below what the replay rounds up, however the seconds were added.
        return tuple(int(seconds * NANOSECONDS * (1 - 1e-12)) for seconds in busy)
