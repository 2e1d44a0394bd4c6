r"""Lagrangian probing: strategies forbidden because memory prices prove that they cost too much.

Where one decision weighs much of the memory, as the layout of an embedding does, memory prices prove little: the
relaxation takes a part of each of its strategies. Tried alone, one of them may fit nowhere, or only in assignments
that cost more than what is known already; without it the bound rises at once. So the nodes whose strategies differ
most in the price of what they use are split in two, those that use much and those that use little, and either part is
forbidden where price steps prove that nothing worth having is in it (probing; Savelsbergh 1994, with Lagrangian bounds
in place of linear programs). At the end the same is asked of every strategy at the prices of what is left.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from formulations.encodings.flat import FlatProblem, flatten
from formulations.encodings.flat_restriction import restrict
from formulations.problem.strategy_problem import BoolArray, IntArray, StrategyProblem
from formulations.solvers.branching.open_leaf import OpenLeaf
from formulations.solvers.branching.tunables import PROBED_NODES, PROBING_FIRST_SHARE, PROBING_STEPS
from formulations.solvers.local_search.moves import priced_usage
from formulations.solvers.prices.ascent import PriceAscent
from formulations.solvers.prices.integer_bound import holds_exact_costs
from formulations.solvers.prices.tunables import FIRST_PAIRS, SHORT_ASCENT


def forbid_above(problem: StrategyProblem, objective: int | None, seconds: float) -> StrategyProblem:
    """Forbid strategies that only assignments that cost more than ``objective`` have.

    Parameters
    ----------
    problem
        A validated problem.
    objective
        Cost of an assignment that is known; None where none is: then only what fits nowhere is forbidden.
    seconds
        For all of it, about.

    Returns
    -------
    StrategyProblem
        The same nodes and strategies; every assignment within the limits that costs at most ``objective`` is left.
        The problem itself where sums of costs or usage leave the range of doubles, or nothing binds.
    """
    flat = flatten(problem)
    if flat.contradiction or not len(flat.usage.limit) or not holds_exact_costs(flat):
        return problem
    most = sum(int(node.cost.max()) for node in problem.nodes)
    most += sum(int(factor.cost.max()) for factor in problem.factors)
    leaf = _Probing(flat, most if objective is None else objective, time.monotonic(), seconds).run()
    if leaf is None:
        return problem  # nothing is left: a solver proves that it is infeasible
    kept = np.split(leaf.kept(), flat.graph.offset[1:-1])
    nodes = []
    for node, supported, flags in zip(problem.nodes, flat.supported, kept, strict=True):
        forbidden = np.ones(node.size, dtype=np.bool_)
        forbidden[supported[flags]] = False
        nodes.append(replace(node, forbidden=forbidden))
    return replace(problem, nodes=tuple(nodes))


class _Probing:
    """The strategies that are left, with prices and a bound, and the clock."""

    def __init__(self, flat: FlatProblem, objective: int, started: float, seconds: float) -> None:
        self.flat, self.objective = flat, objective
        self.started, self.seconds = started, seconds

    def run(self) -> OpenLeaf | None:
        """Return what is left, or None where that is nothing."""
        leaf = self._root()
        cut = True
        while leaf is not None and cut and not self._over():
            cut = False
            for part in self._parts(leaf):
                if self._over():
                    break
                if self._is_dear(leaf, part):
                    leaf, cut = self._without(leaf, part), True
                    break
        return None if leaf is None else leaf.fix_by_reduced_cost(self.objective + 1)

    def _root(self) -> OpenLeaf | None:
        """Climb to good prices of the whole problem."""
        ascent = PriceAscent(self.flat)
        ascent.sweeps(FIRST_PAIRS)
        for done in range(SHORT_ASCENT):
            if self._over(PROBING_FIRST_SHARE):
                break
            ascent.step(done / SHORT_ASCENT)
        whole = restrict(self.flat, np.ones(len(self.flat.unary), dtype=np.bool_))
        if whole is None:
            return None
        start = ascent.best_prices, ascent.best_messages[whole.messages]
        leaf = OpenLeaf(self.flat, whole, -int(self.flat.penalty), start)
        leaf.sweep(1)
        return leaf

    def _parts(self, leaf: OpenLeaf) -> Iterator[BoolArray]:
        """Halves of the nodes whose strategies differ most, as flags laid out as the root's ``unary``."""
        offset = leaf.flat.graph.offset
        weight = priced_usage(leaf.flat, leaf.ascent.best_prices)
        spread = np.maximum.reduceat(weight, offset[:-1]) - np.minimum.reduceat(weight, offset[:-1])
        for node in np.argsort(-spread, kind="stable")[:PROBED_NODES].tolist():
            if spread[node] <= 0:
                return
            entries = np.arange(offset[node], offset[node + 1])
            for half in _halves(weight[entries]):
                flags = np.zeros(len(self.flat.unary), dtype=np.bool_)
                flags[leaf.restriction.entries[entries[half]]] = True
                yield flags

    def _is_dear(self, leaf: OpenLeaf, part: BoolArray) -> bool:
        """Whether price steps prove that all assignments with a strategy of a part cost more than the objective."""
        node = int(np.searchsorted(self.flat.graph.offset, int(np.flatnonzero(part)[0]), side="right")) - 1
        allowed = leaf.kept()
        own = slice(int(self.flat.graph.offset[node]), int(self.flat.graph.offset[node + 1]))
        allowed[own] &= part[own]
        tried = leaf.narrowed(allowed)
        if tried is None:
            return True
        tried.ascent.sweeps(1)
        for _ in range(PROBING_STEPS):
            if tried.ascent.best_bound > self.objective or self._over():
                break
            tried.ascent.step(1.0)
        tried.prove()
        return tried.closed or tried.bound > self.objective

    def _without(self, leaf: OpenLeaf, part: BoolArray) -> OpenLeaf | None:
        """What is left without a part, at prices of its own."""
        rest = leaf.narrowed(leaf.kept() & ~part)
        if rest is None:
            return None
        rest.climb(PROBING_STEPS, self.started + self.seconds)
        return None if rest.closed else rest

    def _over(self, share: float = 1.0) -> bool:
        return time.monotonic() > self.started + share * self.seconds


def _halves(weight: np.typing.NDArray[np.float64]) -> list[IntArray]:
    """Two groups of positions, split at the widest step between weights in order; the heavier group first."""
    order = np.argsort(-weight, kind="stable").astype(np.int64)
    steps = -np.diff(weight[order])
    cut = int(np.argmax(steps)) + 1
    return [order[:cut], order[cut:]]
