"""Routes along view chains: where on a chain a tensor is resharded, and what that costs.

An argument reaches its operator through a chain of views. The stored value has a placement that its
producer chose, the argument one that its consumer requires; in between the tensor may be resharded once, at
the position of the chain where that is cheapest (before a slice one would move too much, after it too
little is left to split).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from formulations.problem.strategy_problem import BoolArray, IntArray
from planner.graph.operator_graph import OperatorGraph, TensorSpec
from planner.graph.placement import Placement, local_numel, reordered, restored
from planner.graph.view_chains import ViewChain
from planner.machine.costs import to_quanta
from planner.machine.resharding import ReshardPath, ReshardPlanner
from planner.strategies.sharding_rules import Strategy

ViewMap = Mapping[Placement, tuple[Placement, ...]]
"""Placements that a view gives its result, by the placement of its source."""


@dataclass(frozen=True, slots=True)
class Route:
    """One way from a stored value to an argument.

    ``before`` holds the placements from the base up to and including the position of resharding,
    ``path`` the placements of the resharding there (a single one where nothing moves) and ``after`` those
    behind it; ``len(before) + len(after) - 1`` is the number of views. ``released_bytes`` is the peak where the
    stored value ends with the first step of the path.
    """

    before: tuple[Placement, ...]
    path: tuple[Placement, ...]
    after: tuple[Placement, ...]
    cost: int
    copy_bytes: int
    peak_bytes: int
    released_bytes: int

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
    released_bytes: IntArray
    forbidden: BoolArray


class ChainRouter:
    """Finds the best route along a chain; equal chains of a deep model share the work.

    Parameters
    ----------
    graph
        The traced step.
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
        self._quanta: dict[float, int] = {}
        self._view_maps: dict[tuple[int, int], ViewMap] = {}
        self._lines: dict[object, _Line] = {}
        self._line_of: dict[ViewChain, _Line] = {}
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
        line = self._line(chain)
        key = (id(line), tuple(sources), tuple(targets))
        if key not in self._tables:
            self._tables[key] = self._build_tables(line, sources, targets)
        return self._tables[key]

    def signature(self, chain: ViewChain) -> object:
        """Hashable identity of a chain's shapes, layouts in memory and rules."""
        base, *specs = self._specs(chain)
        steps = tuple(
            (id(self._views[step.operator]), step.output, after.shape, after.memory_order)
            for step, after in zip(chain.steps, specs, strict=True)
        )
        return (base.shape, base.memory_order, base.dtype, steps)

    def route(self, chain: ViewChain, source: Placement, target: Placement) -> Route | None:
        """Find the cheapest route (then the smallest copy, then the earliest position), or None."""
        return self._route(self._line(chain), source, target)

    def _build_tables(self, line: _Line, sources: Sequence[Placement], targets: Sequence[Placement]) -> RouteTables:
        """Route each pair of different placements once; layouts that share a placement share the entry."""
        rows, columns = ({placement: k for k, placement in enumerate(dict.fromkeys(of))} for of in (sources, targets))
        shape = (len(rows), len(columns))
        cost, copy, peak, released = (np.zeros(shape, dtype=np.int64) for _ in range(4))
        forbidden = np.zeros(shape, dtype=np.bool_)
        for source, i in rows.items():
            for target, j in columns.items():
                route = self._route(line, source, target)
                if route is None:
                    forbidden[i, j] = True
                else:
                    cost[i, j], copy[i, j] = route.cost, route.copy_bytes
                    peak[i, j], released[i, j] = route.peak_bytes, route.released_bytes
        layouts = np.ix_([rows[source] for source in sources], [columns[target] for target in targets])
        cost, copy, peak, released = (table[layouts] for table in (cost, copy, peak, released))
        return RouteTables(cost, copy, peak, released, forbidden[layouts])

    def _line(self, chain: ViewChain) -> _Line:
        if chain not in self._line_of:
            signature = self.signature(chain)
            if signature not in self._lines:
                views = tuple(self._view_map(step.operator, step.output) for step in chain.steps)
                self._lines[signature] = _Line(self._specs(chain), views, self._mesh)
            self._line_of[chain] = self._lines[signature]
        return self._line_of[chain]

    def _specs(self, chain: ViewChain) -> list[TensorSpec]:
        """Specs of the base and of the result of every view."""
        values, operators = self._graph.values, self._graph.operators
        specs = [values[chain.base].spec]
        for step in chain.steps:
            value = operators[step.operator].outputs[step.output]
            assert value is not None
            specs.append(values[value].spec)
        return specs

    def _view_map(self, operator: int, output: int) -> ViewMap:
        strategies = self._views[operator]
        key = (id(strategies), output)
        if key not in self._view_maps:
            found: dict[Placement, dict[Placement, None]] = {}
            for strategy in strategies:
                placement = strategy.outputs[output]
                if placement is not None:
                    found.setdefault(strategy.inputs[0], {})[placement] = None
            self._view_maps[key] = {source: tuple(targets) for source, targets in found.items()}
        return self._view_maps[key]

    def _route(self, line: _Line, source: Placement, target: Placement) -> Route | None:
        key = (source, target)
        if key not in line.routes:
            line.routes[key] = self._search(line, source, target)
        return line.routes[key]

    def _search(self, line: _Line, source: Placement, target: Placement) -> Route | None:
        reached, leading = line.reached(source), line.leading(target)
        if target in reached[-1]:
            return Route(reached[-1][target].way, (target,), (), 0, 0, 0, 0)
        if not line.views:
            return self._direct(line, reached[0][source], leading[0][target])
        best: tuple[int, int] | None = None
        chosen: tuple[int, _Stand, ReshardPath, _Stand] | None = None
        for position, (shape, item_bytes) in enumerate(line.lying):
            ends = leading[position].values()
            for start in reached[position].values():
                paths = self._planner.paths(shape, item_bytes, start.lying)
                for end in ends:
                    path = paths.get(end.lying)
                    if path is not None:
                        found = (self._cost(path.seconds), end.nbytes)
                        if best is None or found < best:
                            best, chosen = found, (position, start, path, end)
        if best is None or chosen is None:
            return None
        position, start, path, end = chosen
        released = path.peak_without(reached[0][source].nbytes)
        return Route(start.way, line.placements(position, path), end.way, *best, path.peak_bytes, released)

    def _direct(self, line: _Line, start: _Stand, end: _Stand) -> Route | None:
        """The route where there are no views, which is most of them."""
        path = self._planner.paths(*line.lying[0], start.lying).get(end.lying)
        if path is None:
            return None
        cost, released = self._cost(path.seconds), path.peak_without(start.nbytes)
        return Route(start.way, line.placements(0, path), (), cost, end.nbytes, path.peak_bytes, released)

    def _cost(self, seconds: float) -> int:
        if seconds not in self._quanta:
            self._quanta[seconds] = int(to_quanta(seconds))
        return self._quanta[seconds]


@dataclass(frozen=True, slots=True)
class _Stand:
    """A placement at a position of a chain.

    ``lying`` is the placement in the order of memory, ``nbytes`` the local bytes there and ``way`` the placements
    from the base to here, this one included, or those behind it up to the argument.
    """

    lying: Placement
    nbytes: int
    way: tuple[Placement, ...]


class _Line:
    """A chain of views without its names: tensors, placements that views allow, and cached results."""

    def __init__(self, specs: Sequence[TensorSpec], views: tuple[ViewMap, ...], mesh: tuple[int, ...]) -> None:
        self.views = views
        self._mesh = mesh
        self._specs = tuple(specs)
        self.orders = tuple(spec.memory_order for spec in specs)
        self.plain = tuple(order == tuple(range(len(order))) for order in self.orders)
        self.lying = tuple(
            (tuple(spec.shape[dim] for dim in order), spec.item_bytes)
            for spec, order in zip(specs, self.orders, strict=True)
        )
        self.routes: dict[tuple[Placement, Placement], Route | None] = {}
        self._reached: dict[Placement, tuple[dict[Placement, _Stand], ...]] = {}
        self._leading: dict[Placement, tuple[dict[Placement, _Stand], ...]] = {}

    def placements(self, position: int, path: ReshardPath) -> tuple[Placement, ...]:
        """Placements of a path in the order of memory as those of the tensor at a position."""
        if self.plain[position]:
            return path.placements
        return tuple(restored(placement, self.orders[position]) for placement in path.placements)

    def reached(self, source: Placement) -> tuple[dict[Placement, _Stand], ...]:
        """Per position, where views alone bring a base at ``source``."""
        if source not in self._reached:
            found = [{source: self._stand(0, source, (source,))}]
            for position, view in enumerate(self.views, start=1):
                found.append(
                    {
                        out: self._stand(position, out, (*stand.way, out))
                        for at, stand in found[-1].items()
                        for out in view.get(at, ())
                    }
                )
            self._reached[source] = tuple(found)
        return self._reached[source]

    def leading(self, target: Placement) -> tuple[dict[Placement, _Stand], ...]:
        """Per position, from where views alone lead to an argument at ``target``."""
        if target not in self._leading:
            found = [{target: self._stand(len(self.views), target, ())}]
            for position in reversed(range(len(self.views))):
                following = found[-1]
                here: dict[Placement, _Stand] = {}
                for at, outs in self.views[position].items():
                    way = next(((out, *following[out].way) for out in outs if out in following), None)
                    if way is not None:
                        here[at] = self._stand(position, at, way)
                found.append(here)
            self._leading[target] = tuple(reversed(found))
        return self._leading[target]

    def _stand(self, position: int, placement: Placement, way: tuple[Placement, ...]) -> _Stand:
        spec = self._specs[position]
        nbytes = local_numel(spec.shape, placement, self._mesh) * spec.item_bytes
        return _Stand(reordered(placement, self.orders[position]), nbytes, way)
