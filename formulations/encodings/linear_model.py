r"""The canonical problem as a linear model: one-hot columns, factor columns, equality marginals.

.. math::

    \min\; constant + \sum_c cost_c z_c
    \quad\text{s.t.}\quad
    \sum_s x_{i,s} = 1, \qquad
    \sum_{e \in f:\, e_k = s} e = x_{scope_k(f), s} \ \ \forall f, k, s, \qquad
    \sum_c usage_{c,r,t}\, z_c \le limit_r \ \ \forall r, t .

Columns ``x`` come first (one group per node), then columns ``e`` (one group per factor that needs
them). This is Alpa's linearisation :math:`e = s_i s_j` (Zheng et al., OSDI 2022, eq. (1)) with
**equality** marginals: with ``<=`` the zero vector would satisfy them and resharding would be free.
Continuous ``e`` in [0, 1] suffices where ``x`` is binary.

Everything is an exact integer. Where costs or usages are too large for a double they are shifted
right, rounding down, so that the model stays a *relaxation*: its bound and its infeasibility always
hold for the problem, and whether an assignment fits is decided by :meth:`UsageTable.profile` on the
original numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from formulations.encodings.usage_rows import UsageTable
from formulations.problem.strategy_problem import BoolArray, Factor, IntArray, StrategyProblem, UsageTerm

COST_BITS = 50
"""Costs are shifted right until each fits into this many bits: exact in a double, and sums in int64."""


@dataclass(frozen=True, slots=True, eq=False)
class FactorColumns:
    """Columns of one factor (parallel factors over the same nodes are merged).

    Parameters
    ----------
    scope
        Node indices, ascending.
    first_column
        Its columns are ``first_column .. first_column + len(entries) - 1``.
    entries
        Allowed table entries, shape ``(columns, len(scope))``: strategies along the scope.
    """

    scope: tuple[int, ...]
    first_column: int
    entries: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class EntryLookup:
    """Finds the chosen entry of all factors at once.

    Factor ``f`` picks ``entry[start[f] + sum(choice[scope[f]] * stride[f])]``, -1 where forbidden;
    scopes shorter than three are padded with stride 0.
    """

    scope: IntArray
    stride: IntArray
    start: IntArray
    entry: IntArray

    @classmethod
    def from_tables(cls, scopes: list[tuple[int, ...]], allowed: list[BoolArray]) -> EntryLookup:
        """Number the allowed entries of every table in row-major order."""
        count = len(scopes)
        scope, stride = np.zeros((count, 3), dtype=np.int64), np.zeros((count, 3), dtype=np.int64)
        pieces: list[IntArray] = [np.zeros(0, dtype=np.int64)]
        for f, (nodes, table) in enumerate(zip(scopes, allowed, strict=True)):
            scope[f, : len(nodes)] = nodes
            stride[f, : len(nodes)] = np.cumprod((1, *table.shape[:0:-1]))[::-1]
            flat = table.ravel()
            pieces.append(np.where(flat, np.cumsum(flat) - 1, -1))
        sizes = np.array([piece.size for piece in pieces], dtype=np.int64)
        return cls(scope, stride, np.cumsum(sizes)[:-1], np.concatenate(pieces))


@dataclass(frozen=True, slots=True, eq=False)
class LinearModel:
    """Arrays of the linear model; see the module docstring for the mathematics.

    Parameters
    ----------
    problem
        The problem that it was built from.
    cost_shift
        Costs of the model are in units of ``2**cost_shift`` of the problem's quantum (0 but for
        enormous costs).
    constant
        Sum of the minima that were subtracted from the cost tables, in those units.
    cost
        Cost per column, non-negative int64 in those units, shape ``(columns,)``.
    allowed
        False where a column is fixed to zero.
    group_start
        Columns of group ``g`` are ``group_start[g] .. group_start[g + 1] - 1``; the first groups are
        the nodes, then the factors in ``factors``. The columns of a group sum to one.
    factors, lookup
        Factors that have columns, and the lookup of their entries.
    row_start, row_column, row_value
        Structural rows (one per node, then one per factor, axis and strategy) in CSR form.
    row_rhs
        Their right-hand sides; all of them are equalities.
    usage
        One table per resource that has a limit (or whose peak is minimised).
    """

    problem: StrategyProblem
    cost_shift: int
    constant: int
    cost: IntArray
    allowed: BoolArray
    group_start: IntArray
    factors: tuple[FactorColumns, ...]
    lookup: EntryLookup
    row_start: IntArray
    row_column: IntArray
    row_value: NDArray[np.float64]
    row_rhs: NDArray[np.float64]
    usage: tuple[UsageTable, ...]

    @property
    def columns(self) -> int:
        """Number of columns."""
        return int(self.cost.shape[0])

    @property
    def one_hot_columns(self) -> int:
        """Number of columns that belong to nodes; they come first and are the integer ones."""
        return int(self.group_start[len(self.problem.nodes)])

    def marginal_rows(self) -> dict[tuple[int, ...], tuple[int, ...]]:
        """First structural row of each axis of each factor, by scope; its rows are one per strategy of the node."""
        sizes = np.diff(self.group_start)
        row, found = len(self.problem.nodes), {}
        for factor in self.factors:
            starts = []
            for i in factor.scope:
                starts.append(row)
                row += int(sizes[i])
            found[factor.scope] = tuple(starts)
        return found

    def choices(self, values: NDArray[np.float64]) -> tuple[int, ...]:
        """Strategy with the largest value at every node."""
        start = self.group_start[: len(self.problem.nodes) + 1]
        ones = values[: self.one_hot_columns]
        largest = np.maximum.reduceat(ones, start[:-1])
        at_largest = np.flatnonzero(ones == np.repeat(largest, np.diff(start)))
        first = at_largest[np.searchsorted(at_largest, start[:-1])]
        return tuple((first - start[:-1]).tolist())

    def local_choice(self, choices: tuple[int, ...]) -> IntArray | None:
        """Index of the chosen column within every group, or None where the choice is forbidden."""
        chosen = np.empty(len(self.group_start) - 1, dtype=np.int64)
        nodes = len(self.problem.nodes)
        chosen[:nodes] = choices
        if not self.allowed[self.group_start[:nodes] + chosen[:nodes]].all():
            return None
        if self.factors:
            flat = self.lookup.start + (chosen[self.lookup.scope] * self.lookup.stride).sum(axis=1)
            chosen[nodes:] = self.lookup.entry[flat]
            if (chosen[nodes:] < 0).any():
                return None
        return chosen

    def column_values(self, choices: tuple[int, ...]) -> NDArray[np.float64] | None:
        """0/1 value of every column under an assignment, or None where it is forbidden."""
        local = self.local_choice(choices)
        if local is None:
            return None
        values = np.zeros(self.columns)
        values[self.group_start[:-1] + local] = 1.0
        return values

    def objective(self, choices: tuple[int, ...]) -> int:
        """Cost of an assignment in the original tables, exact."""
        total = sum(int(node.cost[s]) for node, s in zip(self.problem.nodes, choices, strict=True))
        return total + sum(int(f.cost[tuple(choices[i] for i in f.scope)]) for f in self.problem.factors)


def build_linear_model(problem: StrategyProblem) -> LinearModel:
    """Linearise a problem.

    Parameters
    ----------
    problem
        A validated problem.

    Returns
    -------
    LinearModel
        Structural rows are complete; usage rows are made on demand by ``usage[r].row(t)``.
    """
    return _Builder(problem).build()


def linear_columns(problem: StrategyProblem) -> int:
    """Return how many columns the model of a problem has at most: strategies and allowed entries of factors."""
    allowed = (f.cost.size - (0 if f.forbidden is None else int(f.forbidden.sum())) for f in problem.factors)
    return sum(node.size for node in problem.nodes) + sum(allowed)


@dataclass(slots=True, eq=False)
class _Table:
    """Parallel factors merged: normalised cost, allowed entries, usage terms."""

    cost: IntArray
    allowed: BoolArray
    usage: list[tuple[UsageTerm, IntArray]]


class _Builder:
    """Collects columns and rows; one use."""

    def __init__(self, problem: StrategyProblem) -> None:
        self.problem = problem
        tables = [node.cost for node in problem.nodes] + [factor.cost for factor in problem.factors]
        largest = max((max(int(t.max()), -int(t.min())) for t in tables if t.size), default=0)
        self.cost_shift = max(0, largest.bit_length() - COST_BITS)
        self.constant = 0
        self.limits = tuple(resource.limit for resource in problem.resources)
        self.watched = tuple(r for r, limit in enumerate(self.limits) if limit is not None)
        self.node_cost: list[IntArray] = []
        self.node_allowed: list[BoolArray] = []
        self.node_usage: list[list[tuple[UsageTerm, IntArray]]] = []
        self.tables: dict[tuple[int, ...], _Table] = {}

    def build(self) -> LinearModel:
        for node in self.problem.nodes:
            allowed = np.ones(node.size, dtype=np.bool_) if node.forbidden is None else ~node.forbidden
            self.node_usage.append(self._relevant(node.usage))
            self.node_allowed.append(self._within_limits(allowed, self.node_usage[-1]))
            self.node_cost.append(self._normalised(node.cost >> self.cost_shift, self.node_allowed[-1]))
        for factor in self.problem.factors:
            self._merge(factor)
        pairs = [(scope, table) for scope, table in self.tables.items() if not self._fold(scope, table)]
        return self._assemble(pairs)

    def _relevant(self, terms: tuple[UsageTerm, ...]) -> list[tuple[UsageTerm, IntArray]]:
        return [(t, t.amount) for t in terms if t.start < t.end and t.resource in self.watched and t.amount.any()]

    def _within_limits(self, allowed: BoolArray, usage: list[tuple[UsageTerm, IntArray]]) -> BoolArray:
        for term, amount in usage:
            limit = self.limits[term.resource]
            if limit is not None:
                allowed = allowed & (amount <= limit)
        return allowed

    def _normalised(self, cost: IntArray, allowed: BoolArray) -> IntArray:
        """Subtract the least allowed cost (kept in ``constant``); zero where not allowed."""
        if not allowed.any():
            return np.zeros_like(cost)
        least = int(cost[allowed].min())
        self.constant += least
        return np.where(allowed, cost - least, 0)

    def _merge(self, factor: Factor) -> None:
        order = tuple(np.argsort(factor.scope).tolist())
        scope = tuple(factor.scope[k] for k in order)
        usage = [(t, amount.transpose(order)) for t, amount in self._relevant(factor.usage)]
        allowed = np.ones(factor.cost.shape, dtype=np.bool_) if factor.forbidden is None else ~factor.forbidden
        allowed = self._within_limits(allowed.transpose(order), usage)
        for axis, i in enumerate(scope):
            if not self.node_allowed[i].all():
                shape = [1] * len(scope)
                shape[axis] = -1
                allowed = allowed & self.node_allowed[i].reshape(shape)
        table = _Table(self._normalised(factor.cost.transpose(order) >> self.cost_shift, allowed), allowed, usage)
        known = self.tables.get(scope)
        if known is not None:
            both = known.allowed & allowed
            table = _Table(self._normalised(known.cost + table.cost, both), both, known.usage + usage)
        self.tables[scope] = table

    def _fold(self, scope: tuple[int, ...], table: _Table) -> bool:
        """Move a factor into the costs of its nodes where that is exact; True if nothing is left."""
        if len(scope) == 1:
            (i,) = scope
            self.node_allowed[i] = self.node_allowed[i] & table.allowed
            self.node_usage[i] = self.node_usage[i] + table.usage
            self._add_node_cost(i, table.cost)
            return True
        kept = np.ix_(*(np.flatnonzero(self.node_allowed[i]) for i in scope))
        cost = table.cost[kept]
        if table.usage or not cost.size or not table.allowed[kept].all():
            return False
        parts: list[IntArray] = []
        for axis in range(len(scope)):
            along = cost[tuple(slice(None) if k == axis else 0 for k in range(len(scope)))]
            parts.append(along - (cost.flat[0] if axis else 0))
        total = parts[0]
        for part in parts[1:]:
            total = total[..., None] + part
        if not np.array_equal(total, cost):
            return False
        for i, part in zip(scope, parts, strict=True):
            spread = np.zeros(len(self.node_cost[i]), dtype=np.int64)
            spread[self.node_allowed[i]] = part
            self._add_node_cost(i, spread)
        return True

    def _add_node_cost(self, i: int, cost: IntArray) -> None:
        allowed = self.node_allowed[i]
        self.node_cost[i] = self._normalised(self.node_cost[i] + cost, allowed)

    def _assemble(self, pairs: list[tuple[tuple[int, ...], _Table]]) -> LinearModel:
        entries = [np.argwhere(table.allowed) for _, table in pairs]
        sizes = [len(c) for c in self.node_cost] + [len(e) for e in entries]
        group_start = np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
        nodes = len(self.node_cost)
        factors = tuple(
            FactorColumns(scope, int(group_start[nodes + f]), entries[f]) for f, (scope, _) in enumerate(pairs)
        )
        pieces = [*self.node_cost, *(t.cost[t.allowed] for _, t in pairs)]
        cost = np.concatenate(pieces) if pieces else np.zeros(0, dtype=np.int64)
        allowed = np.ones(len(cost), dtype=np.bool_)
        allowed[: group_start[nodes]] = np.concatenate(self.node_allowed) if nodes else []
        row_start, row_column, row_value, row_rhs = self._rows(group_start, factors)
        terms = [(i, term, amount) for i, usage in enumerate(self.node_usage) for term, amount in usage]
        for f, (_, table) in enumerate(pairs):
            terms += [(nodes + f, term, amount[table.allowed]) for term, amount in table.usage]
        usage = tuple(
            UsageTable.from_terms(
                r,
                self.limits[r],
                self.problem.horizon,
                group_start,
                [(g, term.start, term.end, amount) for g, term, amount in terms if term.resource == r],
            )
            for r in self.watched
        )
        return LinearModel(
            self.problem,
            self.cost_shift,
            self.constant,
            cost,
            allowed,
            group_start,
            factors,
            EntryLookup.from_tables([scope for scope, _ in pairs], [table.allowed for _, table in pairs]),
            row_start,
            row_column,
            row_value,
            row_rhs,
            usage,
        )

    def _rows(
        self, group_start: IntArray, factors: tuple[FactorColumns, ...]
    ) -> tuple[IntArray, IntArray, NDArray[np.float64], NDArray[np.float64]]:
        nodes = len(self.node_cost)
        ones = int(group_start[nodes])
        rows = [np.repeat(np.arange(nodes), np.diff(group_start[: nodes + 1]))]
        columns = [np.arange(ones)]
        values = [np.ones(ones)]
        count = nodes
        for factor in factors:
            own = factor.first_column + np.arange(len(factor.entries))
            for axis, i in enumerate(factor.scope):
                size = len(self.node_cost[i])
                rows += [count + factor.entries[:, axis], count + np.arange(size)]
                columns += [own, group_start[i] + np.arange(size)]
                values += [np.ones(len(own)), np.full(size, -1.0)]
                count += size
        row = np.concatenate(rows)
        order = np.argsort(row, kind="stable")
        row_start = np.concatenate([[0], np.cumsum(np.bincount(row, minlength=count))]).astype(np.int64)
        rhs = np.zeros(count)
        rhs[:nodes] = 1.0
        return row_start, np.concatenate(columns)[order], np.concatenate(values)[order], rhs
