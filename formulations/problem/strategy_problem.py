r"""The canonical problem: one strategy per node, factor costs, memory over time.

Choose one strategy ``x_i`` for every node ``i`` so as to

.. math::

    \min \sum_i cost_i(x_i) + \sum_f cost_f(x_{scope(f)})

subject to, for every resource ``r`` and every integer time ``t`` in ``[0, horizon)``,

.. math::

    \sum_i usage_{i,r}(x_i, t) + \sum_f usage_{f,r}(x_{scope(f)}, t) \le limit_r .

Costs are integers in a time quantum that the builder writes down; usages are integers (bytes).
A forbidden combination is a flag, never a large number inside a sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


class ProblemError(ValueError):
    """A malformed problem; the message names the field, the value and the remedy."""


@dataclass(frozen=True, slots=True, eq=False)
class UsageTerm:
    """Usage of one resource by every entry of a table during one half-open interval.

    Parameters
    ----------
    resource
        Index into :attr:`StrategyProblem.resources`.
    start, end
        Half-open interval ``[start, end)`` of times; an empty interval uses nothing.
    amount
        Amount (bytes, non-negative) per entry; the shape of the table it belongs to. A strategy
        with an interval of its own is a term whose other entries are zero.
    """

    resource: int
    start: int
    end: int
    amount: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A decision with ``len(cost)`` strategies.

    Parameters
    ----------
    name
        For messages and reports; unique within a problem.
    cost
        Cost per strategy, shape ``(S,)``, in the problem's time quantum.
    forbidden
        Flag per strategy, or None when every strategy is allowed.
    usage
        Usage terms with amounts of shape ``(S,)``.
    """

    name: str
    cost: IntArray
    forbidden: BoolArray | None = None
    usage: tuple[UsageTerm, ...] = ()

    @property
    def size(self) -> int:
        """Number of strategies."""
        return int(self.cost.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class Factor:
    """A cost (and possibly usage) that depends on the strategies of one to three nodes.

    Parameters
    ----------
    scope
        Distinct node indices; axis ``k`` of every table belongs to ``scope[k]``.
    cost
        Table of shape ``(S_scope[0], ..., S_scope[-1])``. Several factors may share one array.
    forbidden
        Flags of the same shape, or None.
    usage
        Usage terms with amounts of the same shape.
    """

    scope: tuple[int, ...]
    cost: IntArray
    forbidden: BoolArray | None = None
    usage: tuple[UsageTerm, ...] = ()


@dataclass(frozen=True, slots=True)
class Resource:
    """A capacity that holds at every time, such as device memory (bytes).

    ``limit`` is None where there is no limit.
    """

    name: str
    limit: int | None


@dataclass(frozen=True, slots=True, eq=False)
class StrategyProblem:
    """The canonical problem; see the module docstring for its mathematics.

    Parameters
    ----------
    name
        Name of the instance.
    nodes, factors
        Decisions and the tables that couple them.
    resources
        Capacities; usage terms refer to them by index.
    horizon
        Times are ``0 .. horizon - 1``; an interval may not end after the horizon.
    seconds_per_cost
        Length of the time quantum in seconds, or None where costs have no unit.
    time_names
        Name of each time (for messages), or empty.
    """

    name: str
    nodes: tuple[Node, ...]
    factors: tuple[Factor, ...]
    resources: tuple[Resource, ...]
    horizon: int
    seconds_per_cost: float | None = None
    time_names: tuple[str, ...] = field(default=())

    def usage_terms(self) -> Iterator[tuple[tuple[int, ...], UsageTerm]]:
        """Yield every usage term with the scope of the table it belongs to."""
        for i, node in enumerate(self.nodes):
            for term in node.usage:
                yield (i,), term
        for factor in self.factors:
            for term in factor.usage:
                yield factor.scope, term

    def validate(self) -> None:
        """Check shapes, ranges and types.

        Raises
        ------
        ProblemError
            On the first defect found; the message names the node or factor and the field.
        """
        for i, node in enumerate(self.nodes):
            defect = self._defect(node.cost, node.forbidden, node.usage)
            if node.cost.ndim != 1 or node.size == 0:
                defect = f"cost must be a non-empty vector, got shape {node.cost.shape}"
            if defect:
                raise ProblemError(f"node {i} ({node.name}): {defect}")
        sizes = [node.size for node in self.nodes]
        for j, factor in enumerate(self.factors):
            scope = factor.scope
            if not 1 <= len(scope) <= 3 or len(set(scope)) != len(scope):
                defect = "a scope has one to three distinct nodes"
            elif not 0 <= min(scope) <= max(scope) < len(sizes):
                defect = f"there are only {len(sizes)} nodes"
            elif factor.cost.shape != (shape := tuple([sizes[i] for i in scope])):
                defect = f"cost has shape {factor.cost.shape}, the nodes have {shape}"
            else:
                defect = self._defect(factor.cost, factor.forbidden, factor.usage)
            if defect:
                raise ProblemError(f"factor {j} over {scope}: {defect}")
        self._validate_amounts()
        for resource in self.resources:
            if resource.limit is not None and resource.limit < 0:
                raise ProblemError(f"resource {resource.name}: limit {resource.limit} is negative")

    def _defect(self, cost: IntArray, forbidden: BoolArray | None, usage: tuple[UsageTerm, ...]) -> str:
        """Return the first defect of the tables of a node or factor, or an empty string."""
        if cost.dtype != np.int64:
            return f"cost must be int64, got {cost.dtype}"
        if forbidden is not None and (forbidden.shape != cost.shape or forbidden.dtype != np.bool_):
            return f"forbidden must be boolean of shape {cost.shape}"
        for term in usage:
            if not 0 <= term.resource < len(self.resources):
                return f"usage of resource {term.resource}, which does not exist"
            if not 0 <= term.start <= term.end <= self.horizon:
                return f"usage interval [{term.start}, {term.end}) is not within [0, {self.horizon})"
            if term.amount.shape != cost.shape or term.amount.dtype != np.int64:
                return f"usage amounts must be int64 of shape {cost.shape}"
        return ""

    def _validate_amounts(self) -> None:
        """Check all amounts at once, and search the place of a negative one only where there is one."""
        amounts = list({id(term.amount): term.amount.ravel() for _, term in self.usage_terms()}.values())
        if not amounts or int(np.concatenate(amounts).min(initial=0)) >= 0:
            return
        for scope, term in self.usage_terms():
            if int(term.amount.min(initial=0)) < 0:
                where = f"node {scope[0]} ({self.nodes[scope[0]].name})" if len(scope) == 1 else f"factor over {scope}"
                raise ProblemError(f"{where}: usage amounts must not be negative")
