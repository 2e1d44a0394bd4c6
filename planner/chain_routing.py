"""Routes along view chains: where on a chain a tensor is resharded, and what that costs.

An argument reaches its operator through a chain of views. The stored value has a placement that its
producer chose, the argument one that its consumer wants; in between the tensor may be resharded once, at
the position of the chain where that is cheapest (before a slice one would move too much, after it too
little is left to split).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from formulations.problem import BoolArray, IntArray
from planner.costs import to_quanta
from planner.operator_graph import OperatorGraph, TensorSpec
from planner.placement import Placement, local_numel
from planner.resharding import ReshardPlanner
from planner.sharding_rules import Strategy
from planner.view_chains import ViewChain


@dataclass(frozen=True, slots=True)
class Route:
    """One way from a stored value to an argument.

    ``before`` holds the placements from the base up to and including the position of resharding,
    ``path`` the placements of the resharding there (a single one where nothing moves) and ``after`` those
    behind it; ``len(before) + len(after) - 1`` is the number of views.
    """

    before: tuple[Placement, ...]
    path: tuple[Placement, ...]
    after: tuple[Placement, ...]
    cost: int
    copy_bytes: int
    peak_bytes: int

    @property
    def reshards(self) -> bool:
        """Whether anything moves or is copied."""
        return len(self.path) > 1


@dataclass(frozen=True, slots=True, eq=False)
class RouteTables:
    """Best routes between all source and target placements; shape ``(sources, targets)``."""

    cost: IntArray
    copy_bytes: IntArray
    peak_bytes: IntArray
    forbidden: BoolArray


class ChainRouter:
    """Finds the best route along a chain; equal chains of a deep model share the work.

    Parameters
    ----------
    graph
        The captured step.
    view_strategies
        Strategies of every view operator by index.
    planner
        Costs and paths of resharding on the mesh.
    mesh
        Size of each mesh axis.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        view_strategies: Mapping[int, tuple[Strategy, ...]],
        planner: ReshardPlanner,
        mesh: tuple[int, ...],
    ) -> None:
        self._graph = graph
        self._views = view_strategies
        self._planner = planner
        self._mesh = mesh
        self._forward: dict[tuple[int, int], dict[Placement, tuple[Placement, ...]]] = {}
        self._routes: dict[tuple[object, Placement, Placement], Route | None] = {}
        self._tables: dict[object, RouteTables] = {}

    def tables(self, chain: ViewChain, sources: Sequence[Placement], targets: Sequence[Placement]) -> RouteTables:
        """Route every pair of placements; the result is shared between equal requests.

        Parameters
        ----------
        chain
            From the stored value to the argument.
        sources, targets
            Placements of the stored value and of the argument.

        Returns
        -------
        RouteTables
            Costs in nanoseconds, bytes on one device, and where no route exists.
        """
        signature = self.signature(chain)
        key = (signature, tuple(sources), tuple(targets))
        if key not in self._tables:
            rows = {pair: self.route(chain, *pair) for pair in {(p, q) for p in sources for q in targets}}
            shape = (len(sources), len(targets))
            cost, copy, peak = (np.zeros(shape, dtype=np.int64) for _ in range(3))
            forbidden = np.zeros(shape, dtype=np.bool_)
            for i, source in enumerate(sources):
                for j, target in enumerate(targets):
                    route = rows[source, target]
                    if route is None:
                        forbidden[i, j] = True
                    else:
                        cost[i, j], copy[i, j], peak[i, j] = route.cost, route.copy_bytes, route.peak_bytes
            self._tables[key] = RouteTables(cost, copy, peak, forbidden)
        return self._tables[key]

    def signature(self, chain: ViewChain) -> object:
        """Hashable identity of a chain's shapes, layouts in memory and rules."""
        base = self._graph.values[chain.base].spec
        steps = tuple(
            (id(self._views[step.operator]), step.output, after.shape, after.memory_order)
            for step, after in zip(chain.steps, self._specs_after_views(chain), strict=True)
        )
        return (base.shape, base.memory_order, base.dtype, steps)

    def route(self, chain: ViewChain, source: Placement, target: Placement) -> Route | None:
        """Find the cheapest route (then the smallest copy, then the earliest position), or None."""
        key = (self.signature(chain), source, target)
        if key not in self._routes:
            self._routes[key] = self._search(chain, source, target)
        return self._routes[key]

    def _specs_after_views(self, chain: ViewChain) -> Iterator[TensorSpec]:
        return (self._spec_after(chain, position + 1) for position in range(len(chain.steps)))

    def _spec_after(self, chain: ViewChain, position: int) -> TensorSpec:
        if position == 0:
            return self._graph.values[chain.base].spec
        step = chain.steps[position - 1]
        value = self._graph.operators[step.operator].outputs[step.output]
        assert value is not None
        return self._graph.values[value].spec

    def _view_map(self, chain: ViewChain, position: int) -> dict[Placement, tuple[Placement, ...]]:
        """Output placements by input placement of the view at ``position``."""
        step = chain.steps[position]
        strategies = self._views[step.operator]
        key = (id(strategies), step.output)
        if key not in self._forward:
            found: dict[Placement, dict[Placement, None]] = {}
            for strategy in strategies:
                output = strategy.outputs[step.output]
                if output is not None:
                    found.setdefault(strategy.inputs[0], {})[output] = None
            self._forward[key] = {source: tuple(targets) for source, targets in found.items()}
        return self._forward[key]

    def _search(self, chain: ViewChain, source: Placement, target: Placement) -> Route | None:
        length = len(chain.steps)
        # Ways to stand at each position without resharding: from the source, and towards the target.
        reached: list[dict[Placement, tuple[Placement, ...]]] = [{source: (source,)}]
        for position in range(length):
            view = self._view_map(chain, position)
            reached.append({out: (*way, out) for at, way in reached[-1].items() for out in view.get(at, ())})
        leading: list[dict[Placement, tuple[Placement, ...]]] = [{target: ()}]
        for position in reversed(range(length)):
            following = leading[0]
            here: dict[Placement, tuple[Placement, ...]] = {}
            for at, outs in self._view_map(chain, position).items():
                for out in outs:
                    if out in following and at not in here:
                        here[at] = (out, *following[out])
            leading.insert(0, here)
        if target in reached[length]:
            return Route(reached[length][target], (target,), (), 0, 0, 0)

        best: Route | None = None
        for position in range(length + 1):
            spec = self._spec_after(chain, position)
            for at, way in reached[position].items():
                for to, rest in leading[position].items():
                    path = self._planner.path(spec.shape, spec.item_bytes, at, to, spec.memory_order)
                    if path is None:
                        continue
                    copy = local_numel(spec.shape, to, self._mesh) * spec.item_bytes
                    route = Route(way, path.placements, rest, int(to_quanta(path.seconds)), copy, path.peak_bytes)
                    if best is None or (route.cost, copy) < (best.cost, best.copy_bytes):
                        best = route
        return best
