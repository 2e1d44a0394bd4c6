"""A first pass over a large problem in flat arrays, so that only what it leaves becomes a workspace.

In rounds: strategies without support are dropped, nodes tied by forbidden combinations become one, fixed nodes and
separable tables go into costs, parallel tables are added up. Tables of three nodes, and those that use something,
are left as they are, and their nodes stay decisions.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from formulations.presolve.tie_kernels import (
    BLOCKED,
    Tables,
    add_tables,
    chain_strategies,
    compose_ties,
    dissolve_separable,
    drop_unsupported,
    find_ties,
    merged_amounts,
    merged_costs,
)
from formulations.presolve.workspace.lift import Tied
from formulations.presolve.workspace.shared_arrays import extremes
from formulations.presolve.workspace.state import SAFE_TOTAL, Table, Workspace
from formulations.problem.strategy_problem import BoolArray, Factor, IntArray, StrategyProblem, UsageTerm

REPLACES = frozenset({"arc_consistency", "tied_nodes", "fixed_nodes", "separable_tables"})
"""Reductions whose first turn this pass takes."""


@dataclass(frozen=True, slots=True, eq=False)
class _Flat:
    """A problem's nodes and pairs, and what stands beside them.

    ``alive`` has a flag per strategy, ``apart`` are the factors that the pass leaves alone, and ``pinned`` flags
    their nodes. Usage terms of nodes are ``terms``, of the nodes ``owners``.
    """

    tables: Tables
    alive: BoolArray
    apart: list[Factor]
    pinned: BoolArray
    terms: list[UsageTerm]
    owners: list[int]

    @classmethod
    def of(cls, problem: StrategyProblem) -> _Flat:
        pairs = [factor for factor in problem.factors if len(factor.scope) == 2 and not factor.usage]
        apart = [f for f in problem.factors if len(f.scope) == 3 or (len(f.scope) == 2 and f.usage)]
        start = _bounds([node.size for node in problem.nodes])
        cost = np.concatenate([np.zeros(0, np.int64), *(node.cost for node in problem.nodes)])
        alive = np.ones(len(cost), dtype=np.bool_)
        for i, node in enumerate(problem.nodes):
            if node.forbidden is not None:
                alive[start[i] : start[i + 1]] = ~node.forbidden
        limited = [resource.limit is not None for resource in problem.resources]
        terms: list[UsageTerm] = []
        owners: list[int] = []
        unary = [factor for factor in problem.factors if len(factor.scope) == 1]
        for factor in unary:
            own = slice(start[factor.scope[0]], start[factor.scope[0] + 1])
            cost[own] += factor.cost
            if factor.forbidden is not None:
                alive[own] &= ~factor.forbidden
        usages = itertools.chain(
            ((i, node.usage) for i, node in enumerate(problem.nodes)), ((f.scope[0], f.usage) for f in unary)
        )
        for i, usage in usages:
            for term in usage:
                if term.start < term.end and limited[term.resource]:
                    terms.append(term)
                    owners.append(i)
        pinned = np.zeros(len(problem.nodes), dtype=np.bool_)
        pinned[[i for factor in apart for i in factor.scope]] = True
        return cls(Tables(start, cost, *_stacked(pairs)), alive, apart, pinned, terms, owners)


def _stacked(pairs: Sequence[Factor]) -> tuple[IntArray, IntArray, IntArray, IntArray]:
    """Return the nodes of pairs, where their tables begin, and the tables."""
    bounds = _bounds([factor.cost.size for factor in pairs])
    entries = np.concatenate([np.zeros(0, np.int64), *(factor.cost.ravel() for factor in pairs)])
    for factor, begin, end in zip(pairs, bounds.tolist(), bounds[1:].tolist(), strict=False):
        if factor.forbidden is not None:
            entries[begin:end][factor.forbidden.ravel()] = BLOCKED
    scopes = np.array([factor.scope for factor in pairs], dtype=np.int64).reshape(-1, 2)
    return scopes[:, 0].copy(), scopes[:, 1].copy(), bounds, entries


def sums_are_safe(problem: StrategyProblem) -> bool:
    """Return whether no sum of one entry per table can come near the end of int64."""
    costs = [node.cost for node in problem.nodes] + [factor.cost for factor in problem.factors]
    amounts = [term.amount for _, term in problem.usage_terms()]
    # Sums of doubles are off by far less than the margin of 1 %.
    return 4 * _magnitude(costs) < 0.99 * SAFE_TOTAL and _magnitude(amounts) < 0.99 * SAFE_TOTAL


def _magnitude(arrays: list[IntArray]) -> float:
    least, most = extremes(arrays)
    return float(np.maximum(most.astype(np.float64), -least.astype(np.float64)).sum())


class FirstPass:
    """The rounds, and what they leave.

    Parameters
    ----------
    problem
        A validated problem for which :func:`sums_are_safe`.

    Attributes
    ----------
    contradiction
        Why nothing is feasible, where that was noticed; else empty.
    """

    def __init__(self, problem: StrategyProblem) -> None:
        self.problem = problem
        self.contradiction = ""
        self._flat = _Flat.of(problem)
        self._tables = self._flat.tables
        self._alive = self._flat.alive
        self._top: IntArray = np.arange(len(problem.nodes), dtype=np.int64)
        self._begin = self._tables.start
        sizes = np.diff(self._tables.start)
        self._strategy: IntArray = np.arange(len(self._alive), dtype=np.int64) - np.repeat(self._begin[:-1], sizes)

    def run(self, deadline: float = math.inf) -> bool:
        """Run rounds until nothing changes, but only one after ``deadline``; return whether any changed anything.

        The deadline is one of :func:`time.monotonic`. The first round also takes fixed nodes out of their tables.
        """
        changed = False
        while self._round():
            changed = True
            if self.contradiction or time.monotonic() > deadline:
                break
        return changed

    def workspace(self) -> Workspace:
        """Return what is left."""
        work = Workspace.without_nodes(self.problem)
        self._drop_dead_strategies()
        if self.contradiction:
            work.contradiction = self.contradiction
            return work
        sizes = np.diff(self._tables.start)
        stays = (sizes > 1) | (self._flat.pinned & (sizes == 1))
        fixed = (sizes == 1) & ~stays
        work.offset += sum(self._tables.cost[self._tables.start[:-1][fixed]].tolist())
        for i in np.flatnonzero(stays).tolist():
            own = slice(self._tables.start[i], self._tables.start[i + 1])
            work.alive[i] = True
            work.strategies[i] = self._strategy[self._begin[i] : self._begin[i + 1]]
            work.cost[i] = self._tables.cost[own]
            work.touched.add(i)
        self._add_tables(work)
        self._add_usage(work, stays)
        gone = np.flatnonzero(~stays)
        work.follows.append(Tied.of(gone, self._top, self._begin, self._strategy, self._flat.tables.start))
        return work

    def _round(self) -> bool:
        """Drop, tie and rewrite once; return whether that changed anything."""
        emptied = drop_unsupported(self._tables, self._alive)
        if emptied >= 0:
            self._contradict(emptied)
            return True
        return self._is_contradictory() or self._rewrite(*find_ties(self._tables, self._alive, self._flat.pinned))

    def _drop_dead_strategies(self) -> None:
        """Take out strategies that the last round, for want of time, left dead."""
        nodes = np.arange(len(self._top), dtype=np.int64)
        while not (self.contradiction or self._alive.all() or self._is_contradictory()):
            self._rewrite(nodes, np.full(len(nodes), -1, dtype=np.int64))

    def _is_contradictory(self) -> bool:
        """Return whether a decision has no strategy left, and note which."""
        sizes = np.diff(self._tables.start)
        left = np.bincount(np.repeat(np.arange(len(sizes)), sizes)[self._alive], minlength=len(sizes))
        empty = np.flatnonzero((left == 0) & (sizes > 0))
        if len(empty):
            self._contradict(int(empty[0]))
        return bool(self.contradiction)

    def _contradict(self, node: int) -> None:
        self.contradiction = f"node {self.problem.nodes[node].name}: every strategy is forbidden"

    def _rewrite(self, leader: IntArray, table_of: IntArray) -> bool:
        """Express everything in the strategies of leaders that are alive; return whether that changed anything."""
        before = self._tables
        top, begin, strategy = compose_ties(before, self._alive, leader, table_of)
        nodes = np.arange(len(top), dtype=np.int64)
        sizes = np.where(top == nodes, np.diff(begin), 0)
        start = _bounds(sizes)
        cost = merged_costs(before, top, begin, strategy, start)
        ends = top[before.first], top[before.second]
        low, high = np.minimum(*ends), np.maximum(*ends)
        stays = (low != high) & (sizes[low] > 1) & (sizes[high] > 1)
        scopes, place = np.unique(low[stays] * len(nodes) + high[stays], return_inverse=True)
        place_of: IntArray = np.full(len(low), -1, dtype=np.int64)
        place_of[stays] = place
        first, second = np.divmod(scopes, max(1, len(nodes)))
        bounds = _bounds(sizes[first] * sizes[second])
        alive = np.ones(len(cost), dtype=np.bool_)
        entries = add_tables(before, top, begin, strategy, start, cost, alive, place_of, bounds)
        after = Tables(start, cost, first, second, bounds, entries)
        kept = dissolve_separable(after)
        if not kept.all():
            lengths = np.diff(bounds)
            bounds = _bounds(lengths[kept])
            after = Tables(start, cost, first[kept], second[kept], bounds, entries[np.repeat(kept, lengths)])
        fewer_strategies = len(cost) < len(before.cost)
        lead = self._top
        new_begin = _bounds(np.diff(begin)[lead])
        self._strategy = chain_strategies(self._begin, self._strategy, lead, begin, strategy, new_begin)
        self._top, self._begin = top[lead], new_begin
        self._tables, self._alive = after, alive
        return fewer_strategies or len(after.first) < len(before.first) or not alive.all()

    def _add_tables(self, work: Workspace) -> None:
        tables = self._tables
        blocked = tables.entries == BLOCKED
        cost = np.where(blocked, 0, tables.entries)
        sizes = np.diff(tables.start).tolist()
        bounds = tables.table_start.tolist()
        any_blocked = np.logical_or.reduceat(blocked, tables.table_start[:-1]) if len(tables.first) else blocked
        for i, j, begin, end, flagged in zip(
            tables.first.tolist(), tables.second.tolist(), bounds, bounds[1:], any_blocked.tolist(), strict=False
        ):
            shape = (sizes[i], sizes[j])
            flags = blocked[begin:end].reshape(shape) if flagged else None
            work.add_table((i, j), Table(cost[begin:end].reshape(shape), flags))
        for factor in self._flat.apart:
            work.add_factor(factor)
        work.remove_forbidden()

    def _add_usage(self, work: Workspace, stays: BoolArray) -> None:
        """Add up the usage of all nodes per strategy of their leaders; that of fixed ones is constant."""
        terms, owners = self._flat.terms, np.array(self._flat.owners, dtype=np.int64)
        if not terms:
            return
        leaders = self._top[owners]
        keys = [
            (leader, term.resource, term.start, term.end) for leader, term in zip(leaders.tolist(), terms, strict=True)
        ]
        groups = {key: place for place, key in enumerate(dict.fromkeys(keys))}
        sizes = np.diff(self._begin)
        bounds = _bounds([sizes[key[0]] for key in groups])
        group = np.array([groups[key] for key in keys], dtype=np.int64)
        amounts = merged_amounts(
            np.concatenate([term.amount for term in terms]),
            _bounds([term.amount.size for term in terms])[:-1],
            owners,
            self._begin,
            self._strategy,
            bounds[:-1][group],
        )
        used = np.logical_or.reduceat(amounts != 0, bounds[:-1]).tolist()
        for (leader, resource, start, end), a, b, counts in zip(
            groups, bounds[:-1].tolist(), bounds[1:].tolist(), used, strict=True
        ):
            if not counts:
                continue
            if stays[leader]:
                work.usage[leader][resource, start, end] = amounts[a:b]
            else:
                work.constant_usage[resource][start:end] += amounts[a]


def _bounds(sizes: Sequence[int] | IntArray) -> IntArray:
    """Return where pieces of these sizes begin, and where the last one ends."""
    return np.concatenate([np.zeros(1, dtype=np.int64), np.cumsum(sizes, dtype=np.int64)])
