"""The problem while it is being reduced: arrays per node and table, changed step by step.

Every step leaves a problem with the same optimum, so that reduction may stop at any moment. Totals that do not
depend on any decision are kept aside in exact integers: ``offset`` of the cost, ``constant_usage`` of memory.
Where sums could leave int64, arrays hold Python integers.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from formulations.presolve.workspace.lift import Follow, Tied
from formulations.problem.strategy_problem import BoolArray, Factor, IntArray, StrategyProblem, UsageTerm

if TYPE_CHECKING:
    from formulations.presolve.workspace.levels import Levels

Integers = NDArray[Any]
"""int64, or Python integers in an object array."""

Interval = tuple[int, int, int]
"""Resource, start, end."""

Usage = dict[Interval, Integers]
Scope = tuple[int, ...]

SAFE_TOTAL = 2**60
"""Not tunable: below this no sum of totals leaves int64."""

_NOTHING: IntArray = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, slots=True, eq=False)
class Table:
    """All that depends on the strategies of two or three nodes.

    Parameters
    ----------
    cost
        One axis per node of the ascending scope; 0 where forbidden.
    forbidden
        Flags, or None where everything is allowed.
    usage
        Amounts of the same shape per interval.
    """

    cost: Integers
    forbidden: BoolArray | None = None
    usage: Usage = field(default_factory=dict)

    def at(self, index: Any) -> Table:
        """Index all arrays alike."""
        forbidden = None if self.forbidden is None else self.forbidden[index]
        if forbidden is not None and not forbidden.any():
            forbidden = None
        return Table(self.cost[index], forbidden, {key: amount[index] for key, amount in self.usage.items()})

    def plus(self, other: Table) -> Table:
        """Add a table over the same nodes."""
        forbidden = self.forbidden
        if other.forbidden is not None:
            forbidden = other.forbidden if forbidden is None else forbidden | other.forbidden
        cost = self.cost + other.cost
        if forbidden is not None:
            cost = np.where(forbidden, 0, cost)
        usage = dict(self.usage)
        add_usage(usage, other.usage)
        return Table(cost, forbidden, usage)


def add_usage(usage: Usage, more: Mapping[Interval, Integers]) -> None:
    """Add amounts to ``usage``, in place; its arrays are replaced, not changed."""
    for key, amount in more.items():
        known = usage.get(key)
        usage[key] = amount if known is None else known + amount


class Workspace:
    """A problem under reduction.

    Attributes
    ----------
    alive
        Whether a node is still a decision.
    strategies
        Per node the original indices of its remaining strategies, ascending.
    cost, usage
        Per node and remaining strategy.
    tables, incident
        Tables by ascending scope, and the scopes that contain a node (as keys, in order of insertion).
    offset
        Cost that is paid in any case.
    limits, horizons
        Per resource; ``horizons`` shrink when times are renumbered.
    constant_usage
        Per resource what is used in any case, shape ``(horizon,)``.
    follows
        How removed nodes follow from others, in order of removal.
    touched
        Nodes that changed, or whose tables did, since someone last emptied the set.
    levels
        Per resource the usage over time that :mod:`formulations.presolve.workspace.levels` added up last.
    contradiction
        Why nothing is feasible, where a step noticed that; else empty.
    deadline
        Of :func:`time.monotonic`; a reduction that finds it passed (:meth:`out_of_time`) stops where it is.
    """

    def __init__(self, problem: StrategyProblem) -> None:
        self._begin(problem, *_types(problem))
        for i, node in enumerate(problem.nodes):
            self.alive[i] = True
            self.strategies[i] = np.arange(node.size, dtype=np.int64)
            self.cost[i] = self._costs(node.cost)
            self.usage[i] = self._usage(node.usage, None)
            if node.forbidden is not None:
                self._forbidden[i] = node.forbidden
        for factor in problem.factors:
            self.add_factor(factor)
        self.touched.update(range(len(problem.nodes)))
        self.remove_forbidden()

    @classmethod
    def without_nodes(cls, problem: StrategyProblem) -> Workspace:
        """Return a workspace in which no node is alive yet, for who fills it; sums must not leave int64."""
        work = cls.__new__(cls)
        work._begin(problem, np.int64, np.int64)
        return work

    def _begin(self, problem: StrategyProblem, cost_type: type[Any], amount_type: type[Any]) -> None:
        count = len(problem.nodes)
        self.cost_type, self.amount_type = cost_type, amount_type
        self.limits = [resource.limit for resource in problem.resources]
        self.horizons = [problem.horizon] * len(problem.resources)
        self.constant_usage: list[Integers] = [np.zeros(problem.horizon, dtype=amount_type) for _ in problem.resources]
        self.offset = 0
        self.follows: list[Follow | Tied] = []
        self.touched: set[int] = set()
        self.levels: dict[int, dict[Scope, Levels]] = {}
        self.contradiction = ""
        self.deadline = math.inf
        self.names = [node.name for node in problem.nodes]
        self.alive = [False] * count
        self.strategies: list[IntArray] = [_NOTHING] * count
        self.cost: list[Integers] = [_NOTHING] * count
        self.usage: list[Usage] = [{} for _ in range(count)]
        self.tables: dict[Scope, Table] = {}
        self.incident: list[dict[Scope, None]] = [{} for _ in range(count)]
        self._forbidden: dict[int, BoolArray] = {}

    def out_of_time(self) -> bool:
        """Return whether ``deadline`` has passed."""
        return time.monotonic() > self.deadline

    def add_factor(self, factor: Factor) -> None:
        """Add a factor of the problem, as far as strategies of its nodes are left."""
        order = sorted(range(len(factor.scope)), key=factor.scope.__getitem__)
        scope = tuple(factor.scope[k] for k in order)
        cost, forbidden = _in_order(self._costs(factor.cost), order), factor.forbidden
        if forbidden is not None:
            forbidden = _in_order(forbidden, order) if forbidden.any() else None
        if forbidden is not None:
            cost = np.where(forbidden, 0, cost)
        table = Table(cost, forbidden, self._usage(factor.usage, order))
        if cost.shape != tuple(len(self.strategies[i]) for i in scope):
            table = table.at(np.ix_(*(self.strategies[i] for i in scope)))
        self.add_table(scope, table)

    def _costs(self, cost: IntArray) -> Integers:
        return cost if self.cost_type is np.int64 else cost.astype(object)

    def _usage(self, terms: tuple[UsageTerm, ...], order: list[int] | None) -> Usage:
        usage: Usage = {}
        for term in terms:
            if term.start < term.end and self.limits[term.resource] is not None and term.amount.any():
                amount = term.amount if order is None else _in_order(term.amount, order)
                exact = amount if self.amount_type is np.int64 else amount.astype(object)
                add_usage(usage, {(term.resource, term.start, term.end): exact})
        return usage

    def living(self) -> Iterable[int]:
        """Yield the nodes that are still decisions."""
        return (i for i, alive in enumerate(self.alive) if alive)

    def add_table(self, scope: Scope, table: Table) -> None:
        """Add a table of one to three nodes to what is there over the same nodes.

        Strategies that a table of one node forbids are removed by the next :meth:`remove_forbidden`.
        """
        self.touched.update(scope)
        if len(scope) == 1:
            (i,) = scope
            self.cost[i] = self.cost[i] + table.cost
            add_usage(self.usage[i], table.usage)
            if table.forbidden is not None:
                known = self._forbidden.get(i)
                self._forbidden[i] = table.forbidden if known is None else known | table.forbidden
            return
        present = self.tables.get(scope)
        self.tables[scope] = table if present is None else present.plus(table)
        for i in scope:
            self.incident[i][scope] = None

    def pop_table(self, scope: Scope) -> Table:
        """Take a table out."""
        self.touched.update(scope)
        for i in scope:
            del self.incident[i][scope]
        return self.tables.pop(scope)

    def remove_forbidden(self) -> bool:
        """Remove strategies that are forbidden by themselves; return whether there were any."""
        if not self._forbidden:
            return False
        keep = {i: ~flags for i, flags in self._forbidden.items()}
        self._forbidden = {}
        return self.restrict(keep)

    def restrict(self, keep: Mapping[int, BoolArray]) -> bool:
        """Keep only the flagged strategies of some nodes; return whether that removed any."""
        smaller = {i: flags for i, flags in keep.items() if not flags.all()}
        for i, flags in smaller.items():
            if not flags.any():
                self.contradiction = f"node {self.names[i]}: every strategy is forbidden"
                return True
        scopes: dict[Scope, None] = {}
        for i, flags in smaller.items():
            self.strategies[i] = self.strategies[i][flags]
            self.cost[i] = self.cost[i][flags]
            self.usage[i] = {key: amount[flags] for key, amount in self.usage[i].items()}
            scopes.update(self.incident[i])
        for scope in scopes:
            index = np.ix_(*(smaller.get(i, np.ones(n, np.bool_)) for i, n in self._sizes_of_table(scope)))
            self.tables[scope] = self.tables[scope].at(index)
            self.touched.update(scope)
        self.touched.update(smaller)
        return bool(smaller)

    def _sizes_of_table(self, scope: Scope) -> list[tuple[int, int]]:
        return list(zip(scope, self.tables[scope].cost.shape, strict=True))

    def remove_node(self, node: int, others: Scope, best: IntArray) -> None:
        """End a node as a decision: ``best`` has its place among its strategies for all strategies of ``others``.

        Its cost, usage and tables must have been handed on before.
        """
        kept = tuple(self.strategies[other] for other in others)
        self.follows.append(Follow(node, others, kept, self.strategies[node][best]))
        self.alive[node] = False

    def check_constant_usage(self) -> bool:
        """Return whether constant usage alone is over a limit, and note that as the contradiction."""
        for resource, (limit, profile) in enumerate(zip(self.limits, self.constant_usage, strict=True)):
            most = int(profile.max(initial=0))
            if limit is not None and most > limit:
                self.contradiction = f"at least {most} is used of resource {resource}, the limit is {limit}"
        return bool(self.contradiction)

    def uses_memory(self, node: int) -> bool:
        """Return whether limited usage depends on what a node chooses."""
        return bool(self.usage[node]) or any(self.tables[scope].usage for scope in self.incident[node])


def _in_order(table: NDArray[Any], order: list[int]) -> NDArray[Any]:
    """Return a table with its axes in another order; the same array, not a view of it, where nothing changes."""
    return table if order == sorted(order) else table.transpose(order)


def _types(problem: StrategyProblem) -> tuple[type[Any], type[Any]]:
    """int64 where no sum of one entry per table can leave it, else Python integers."""
    tables = [node.cost for node in problem.nodes] + [factor.cost for factor in problem.factors]
    cost = sum(max(int(table.max(initial=0)), -int(table.min(initial=0))) for table in tables)
    amount = sum(int(term.amount.max(initial=0)) for _, term in problem.usage_terms())
    return np.int64 if 4 * cost < SAFE_TOTAL else np.object_, np.int64 if amount < SAFE_TOTAL else np.object_
