"""Any canonical problem in the contest's form: one usage interval per node, tables over pairs, one resource.

The contest's file has one interval and one resource for a node, and no usage on edges. What a problem has beyond that
becomes *auxiliary nodes* behind its own nodes. The best strategy of an auxiliary node follows from those of its
*parents* through forbidden pairs, so the cost and the usage of every assignment stay what they are:

* a further interval of a node is a node whose strategies are the different amounts in that interval;
* usage over two nodes, and any table over three, is a node whose strategies are boxes of that table
  (:mod:`formulations.instances.box_cover`); where several boxes are allowed, one of them has the table's value and the
  others have more;
* a second resource is moved behind the first one in time, and a constant fills it up to the one limit.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from formulations.instances.box_cover import cover
from formulations.instances.contest import FORBIDDEN_COST, LATEST_TIME
from formulations.problem.files import write_bytes_atomically
from formulations.problem.gc_pause import gc_paused
from formulations.problem.strategy_problem import (
    BoolArray,
    Factor,
    IntArray,
    Node,
    ProblemError,
    Resource,
    StrategyProblem,
    UsageTerm,
)

Interval = tuple[int, int]
_LARGEST_LIMIT = 1 << 62
_Table = TypeVar("_Table", Node, Factor)


@dataclass(frozen=True, slots=True, eq=False)
class ContestForm:
    """A problem in the contest's form, and what its assignments mean.

    Parameters
    ----------
    problem
        Its first nodes are those of the given problem, in order; auxiliary nodes follow.
    decisions
        Number of nodes of the given problem.
    offset
        Cost of an assignment of the given problem less its cost here; 0 unless costs are negative.
    followers
        Per auxiliary node its parents among the first nodes, and its strategy by their strategies.
    """

    problem: StrategyProblem
    decisions: int
    offset: int
    followers: tuple[tuple[tuple[int, ...], IntArray], ...]

    def restrict(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Return the assignment of the given problem; shape ``(decisions,)``."""
        return tuple(choices[: self.decisions])

    def extend(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Return the assignment in the contest's form of one of the given problem."""
        implied = (int(table[tuple(choices[i] for i in parents)]) for parents, table in self.followers)
        return (*choices, *implied)


@gc_paused()
def contest_form(problem: StrategyProblem) -> ContestForm:
    """Bring a problem into the contest's form.

    Raises
    ------
    ProblemError
        The problem is malformed, has more than ten million times, or a limit beyond 62 bits.
    """
    problem.validate()
    return _Former(problem).form()


def write_contest_problem(path: str | Path, problem: StrategyProblem) -> None:
    """Write a problem in the contest's form as its JSON, compressed where the name ends in ``.gz``; atomically.

    The same problem gives the same bytes.

    Raises
    ------
    ProblemError
        The problem is not in this form (see :func:`contest_form`), or a cost is as large as those of forbidden pairs.
    OSError
        The file cannot be written.
    """
    text = json.dumps({"problem": _document(problem)}, separators=(",", ":")).encode()
    write_bytes_atomically(path, gzip.compress(text, mtime=0) if str(path).endswith(".gz") else text)


def _document(problem: StrategyProblem) -> dict[str, Any]:
    if len(problem.resources) > 1 or any(factor.usage for factor in problem.factors):
        raise ProblemError(f"problem {problem.name}: bring it into the contest's form first (contest_form)")
    terms = [node.usage[0] if node.usage else None for node in problem.nodes]
    document = {
        "name": problem.name,
        "nodes": {
            "intervals": [[0, 0] if term is None else [term.start, term.end] for term in terms],
            "costs": [_written(node, f"node {i} ({node.name})") for i, node in enumerate(problem.nodes)],
            "usages": [
                [0] * node.size if term is None else term.amount.tolist()
                for node, term in zip(problem.nodes, terms, strict=True)
            ],
        },
        "edges": {
            "nodes": [list(factor.scope) for factor in problem.factors],
            "costs": [_written(factor, f"factor {j} over {factor.scope}") for j, factor in enumerate(problem.factors)],
        },
    }
    limits = [resource.limit for resource in problem.resources if resource.limit is not None]
    return document | ({"usage_limit": limits[0]} if limits else {})


def _written(table: Node | Factor, where: str) -> list[int]:
    if not 0 <= int(table.cost.min(initial=0)) <= int(table.cost.max(initial=0)) < FORBIDDEN_COST:
        raise ProblemError(f"{where}: the contest's costs are from 0 to below 10^18; use a coarser unit")
    cost = table.cost if table.forbidden is None else np.where(table.forbidden, FORBIDDEN_COST, table.cost)
    found: list[int] = cost.ravel().tolist()
    return found


class _Former:
    """Collects nodes and factors in the contest's form; one use."""

    def __init__(self, problem: StrategyProblem) -> None:
        self.given = problem
        limited = [(r, resource.limit) for r, resource in enumerate(problem.resources) if resource.limit is not None]
        self.shift = {r: place * problem.horizon for place, (r, _) in enumerate(limited)}
        self.limit = max((limit for _, limit in limited), default=None)
        if self.limit is not None and self.limit >= _LARGEST_LIMIT:
            raise ProblemError(f"problem {problem.name}: the limit {self.limit} is beyond 62 bits; use a coarser unit")
        self.horizon = max(1, len(limited)) * problem.horizon
        if self.horizon > LATEST_TIME:
            raise ProblemError(f"problem {problem.name}: reaches time {self.horizon}; the contest has {LATEST_TIME}")
        self.nodes: list[Node] = [replace(node, usage=()) for node in problem.nodes]
        self.terms: list[dict[Interval, IntArray]] = [self._merged(node) for node in problem.nodes]
        self.parents: list[tuple[tuple[int, ...], IntArray]] = [
            ((i,), np.arange(node.size)) for i, node in enumerate(problem.nodes)
        ]
        """Per node, auxiliary ones included, the given nodes that it follows from, and its strategy by theirs."""
        self.factors: list[Factor] = []
        self.constant: dict[Interval, int] = defaultdict(int)
        for r, limit in limited:
            self.constant[self.shift[r], self.shift[r] + problem.horizon] += (self.limit or 0) - limit
        self.offset = 0

    def form(self) -> ContestForm:
        """Return the problem in the contest's form."""
        for factor in self.given.factors:
            self._add_factor(factor)
        for i in range(len(self.nodes)):
            self._give_usage(i)
        for (start, end), total in sorted(self.constant.items()):
            amount = min(total, (self.limit or 0) + 1)
            if amount:
                self._follow((), np.zeros((), dtype=np.int64), 1)
                self.nodes[-1] = replace(self.nodes[-1], usage=(UsageTerm(0, start, end, np.array([amount])),))
        self.nodes = [self._raised(node) for node in self.nodes]
        self.factors = [self._raised(factor) for factor in self.factors]
        resources = () if self.limit is None else (Resource("memory", self.limit),)
        given = self.given
        formed = StrategyProblem(
            given.name, tuple(self.nodes), tuple(self.factors), resources, self.horizon, given.seconds_per_cost
        )
        formed.validate()
        return ContestForm(formed, len(given.nodes), self.offset, tuple(self.parents[len(given.nodes) :]))

    def _merged(self, table: Node | Factor) -> dict[Interval, IntArray]:
        """Usage that a limit counts, one table per interval."""
        found: dict[Interval, IntArray] = {}
        for term in table.usage:
            if term.resource not in self.shift or term.start >= term.end or not term.amount.any():
                continue
            shift = self.shift[term.resource]
            interval = term.start + shift, term.end + shift
            most = (self.given.resources[term.resource].limit or 0) + 1  # no more than that need be told apart
            known = found.get(interval, np.zeros_like(term.amount))
            found[interval] = known + np.minimum(term.amount, most - known)
        return found

    def _add_factor(self, factor: Factor) -> None:
        terms = self._merged(factor)
        if len(factor.scope) == 1:
            self._add_to_node(factor, terms)
            return
        is_pair = len(factor.scope) == 2
        flags = np.zeros(factor.cost.shape, dtype=np.bool_) if factor.forbidden is None else factor.forbidden
        if is_pair and (factor.cost.any() or flags.any()):
            self.factors.append(replace(factor, usage=()))
        if is_pair and not terms:
            return
        # A pair's own table forbids what is forbidden; of three nodes an auxiliary node does.
        if not is_pair:
            self._add_boxes(factor.scope, terms, [factor.cost, flags.astype(np.int64)])
            return
        alike: dict[bytes, dict[Interval, IntArray]] = defaultdict(dict)
        for interval, amount in terms.items():
            alike[amount.tobytes()][interval] = amount
        for group in alike.values():
            self._add_boxes(factor.scope, group, [])

    def _add_boxes(self, scope: tuple[int, ...], terms: dict[Interval, IntArray], own: Sequence[IntArray]) -> None:
        """Add an auxiliary node for the usage over a scope, and for its cost and forbidden entries where given."""
        tables = [*terms.values(), *own]
        classes = [_classes(axis, tables) for axis in range(len(scope))]
        told_apart = [axis for axis, (first, _) in enumerate(classes) if len(first) > 1]
        if not own and len(told_apart) < 2:
            axis = told_apart[0] if told_apart else 0
            self._add_terms(scope[axis], {key: np.take(amount, 0, axis=1 - axis) for key, amount in terms.items()})
            return
        chosen = np.ix_(*(first for first, _ in classes))
        boxes = cover(np.stack([table[chosen] for table in tables], axis=-1))
        auxiliary = self._follow(scope, boxes.box_of[np.ix_(*(of for _, of in classes))], len(boxes.values))
        if own:
            cost, forbidden = boxes.values[:, -2], boxes.values[:, -1] > 0
            self.nodes[auxiliary] = replace(self.nodes[auxiliary], cost=cost, forbidden=forbidden)
        self.terms[auxiliary] = {key: boxes.values[:, column] for column, key in enumerate(terms)}
        for i, (_, of), side in zip(scope, classes, boxes.sides, strict=True):
            self._tie(i, auxiliary, side[of])

    def _add_to_node(self, factor: Factor, terms: dict[Interval, IntArray]) -> None:
        (i,) = factor.scope
        node = self.nodes[i]
        flags = [each for each in (node.forbidden, factor.forbidden) if each is not None]
        forbidden = np.logical_or.reduce(flags) if flags else None
        self.nodes[i] = replace(node, cost=node.cost + factor.cost, forbidden=forbidden)
        self._add_terms(i, terms)

    def _add_terms(self, i: int, terms: dict[Interval, IntArray]) -> None:
        for interval, amount in terms.items():
            known = self.terms[i].get(interval, np.zeros_like(amount))
            self.terms[i][interval] = known + np.minimum(amount, (self.limit or 0) + 1 - known)

    def _give_usage(self, i: int) -> None:
        """Leave a node the interval with the most amounts; the others go to nodes of their own."""
        amounts = {interval: np.unique(amount, return_inverse=True) for interval, amount in self.terms[i].items()}
        varied = {interval: each for interval, each in amounts.items() if len(each[0]) > 1}
        for interval in amounts.keys() - varied.keys():
            self.constant[interval] += int(amounts[interval][0][0])
        if not varied:
            return
        own = max(varied, key=lambda interval: (len(varied[interval][0]), interval[1] - interval[0], interval))
        self.nodes[i] = replace(self.nodes[i], usage=(UsageTerm(0, *own, self.terms[i][own]),))
        for (start, end), (values, of) in sorted(varied.items(), key=lambda item: item[0]):
            if (start, end) == own:
                continue
            parents, strategy = self.parents[i]
            auxiliary = self._follow(parents, of[strategy], len(values))
            self.nodes[auxiliary] = replace(self.nodes[auxiliary], usage=(UsageTerm(0, start, end, values),))
            self._tie(i, auxiliary, of[:, None] == np.arange(len(values))[None, :])

    def _follow(self, parents: tuple[int, ...], strategy: IntArray, size: int) -> int:
        """Add an auxiliary node and return its index."""
        self.nodes.append(Node(f"auxiliary {len(self.nodes)}", np.zeros(size, dtype=np.int64)))
        self.terms.append({})
        self.parents.append((parents, strategy))
        return len(self.nodes) - 1

    def _tie(self, i: int, auxiliary: int, allowed: BoolArray) -> None:
        self.factors.append(Factor((i, auxiliary), np.zeros(allowed.shape, dtype=np.int64), ~allowed))

    def _raised(self, table: _Table) -> _Table:
        """The table with costs from 0 on; what was added is kept in the offset."""
        cost = table.cost if table.forbidden is None else np.where(table.forbidden, 0, table.cost)
        least = int(cost.min(initial=0))
        self.offset += least
        return replace(table, cost=cost - least)


def _classes(axis: int, tables: Sequence[IntArray]) -> tuple[IntArray, IntArray]:
    """First strategy of each class along an axis, and the class of every strategy."""
    rows = [np.moveaxis(table, axis, 0).reshape(table.shape[axis], -1) for table in tables]
    _, first, of = np.unique(np.concatenate(rows, axis=1), axis=0, return_index=True, return_inverse=True)
    return first, of.ravel()
