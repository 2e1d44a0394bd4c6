"""Joint choices of a few nodes that no other joint choice beats, node by node.

Dynamic programming over the nodes in an order, with Pareto sets in the place of minima: a state is what the
nodes so far choose. Nodes that some later node shares a table with are open; among states with equal choices
of the open nodes, one that costs no less and uses no less at any time than another is replaced by that one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from formulations.presolve.workspace.component_parts import Coupling, Front, Part
from formulations.presolve.workspace.state import Integers, Workspace
from formulations.presolve.workspace.tunables import FRONT_COMPARISONS, FRONT_STATES
from formulations.problem.strategy_problem import BoolArray, IntArray


@dataclass(frozen=True, slots=True, eq=False)
class _States:
    """Per state its cost, its amounts per interval, and the places of the decided nodes' strategies."""

    cost: Integers
    amounts: Integers
    choices: IntArray

    def at(self, rows: IntArray) -> _States:
        return _States(self.cost[rows], self.amounts[rows], self.choices[rows])


def front_of(work: Workspace, part: Part, most: int) -> Front | None:
    """Return the front of a part, as :func:`pareto_front` does; that of equal parts is computed once a workspace."""
    key = part.digest(), most
    if key not in work.fronts:
        work.fronts[key] = pareto_front(part, most)
    return work.fronts[key]


def pareto_front(part: Part, most: int) -> Front | None:
    """Return the front of a part, or None where it, or the work, is too large.

    Parameters
    ----------
    part
        Any part; the front is empty where each of its joint choices is forbidden.
    most
        Joint choices that the front may have.
    """
    order, open_after = _order(part)
    most_states = _most_states(part.covers.shape[1])
    states = _States(
        np.zeros(1, dtype=part.cost[0].dtype),
        np.zeros((1, len(part.intervals)), dtype=part.amounts[0].dtype),
        np.zeros((1, 0), dtype=np.int64),
    )
    steps: list[IntArray] = []
    for count, node in enumerate(order):
        before, size = len(states.cost), len(part.cost[node])
        if before * size > most_states:
            return None
        following, allowed = _extended(part, states, order[: count + 1])
        kept = np.flatnonzero(allowed)
        following = following.at(kept)
        still_open = [order.index(k) for k in open_after[count]]
        apart = _ranks_of_rows(following.choices[:, still_open])
        beaten_by = _beaten_by(apart, following.cost, following.amounts @ part.covers)
        survivors = np.unique(beaten_by)
        step: IntArray = np.full(before * size, -1, dtype=np.int64)
        step[kept] = np.searchsorted(survivors, beaten_by)
        steps.append(step.reshape(before, size))
        states = following.at(survivors)
    if len(states.cost) > most:
        return None
    return Front(states.cost, states.amounts, order, states.choices, tuple(steps))


def _extended(part: Part, states: _States, decided: tuple[int, ...]) -> tuple[_States, BoolArray]:
    """Return each state with each strategy of the last decided node, strategies fastest, and what is allowed."""
    size = len(part.cost[decided[-1]])
    state, strategy = np.divmod(np.arange(len(states.cost) * size, dtype=np.int64), size)
    cost = states.cost[state] + part.cost[decided[-1]][strategy]
    amounts = states.amounts[state] + part.amounts[decided[-1]][strategy]
    choices: IntArray = np.column_stack([states.choices[state], strategy])
    allowed: BoolArray = np.ones(len(cost), dtype=np.bool_)
    for coupling in _completed(part.couplings, decided):
        index = tuple(choices[:, decided.index(k)] for k in coupling.scope)
        cost = cost + coupling.cost[index]
        amounts = amounts + coupling.amounts[index]
        if coupling.forbidden is not None:
            allowed &= ~coupling.forbidden[index]
    return _States(cost, amounts, choices), allowed


def _order(part: Part) -> tuple[tuple[int, ...], list[list[int]]]:
    """Return an order with few combinations of open nodes, and which nodes are open after each of its steps."""
    sizes = [len(cost) for cost in part.cost]
    scopes = [coupling.scope for coupling in part.couplings]
    order: list[int] = []
    open_after: list[list[int]] = []
    left = list(range(len(sizes)))
    while left:
        candidates = {node: _open(scopes, [*order, node]) for node in left}
        node = min(left, key=lambda k: (float(np.prod([sizes[i] for i in candidates[k]], dtype=np.float64)), k))
        order.append(node)
        open_after.append(candidates[node])
        left.remove(node)
    return tuple(order), open_after


def _open(scopes: Sequence[tuple[int, ...]], decided: list[int]) -> list[int]:
    known = set(decided)
    waiting = {i for scope in scopes if not known.issuperset(scope) for i in scope}
    return sorted(known & waiting)


def _completed(couplings: Sequence[Coupling], decided: tuple[int, ...]) -> list[Coupling]:
    """Return the tables that the last decided node completes."""
    known = set(decided)
    return [coupling for coupling in couplings if decided[-1] in coupling.scope and known.issuperset(coupling.scope)]


def _most_states(segments: int) -> int:
    """Return how many states are compared at once; usage at several times is compared pair by pair."""
    return FRONT_STATES if segments <= 1 else math.isqrt(FRONT_COMPARISONS // segments)


def _beaten_by(apart: IntArray, cost: Integers, levels: Integers) -> IntArray:
    """Return per state the one that stands for it, itself where no other beats it.

    Parameters
    ----------
    apart
        States with different numbers cannot be compared.
    cost, levels
        Per state its cost, and its usage of each segment, shape ``(states, segments)``.
    """
    count, segments = levels.shape
    if segments <= 1:
        level = levels[:, 0] if segments else np.zeros(count, dtype=np.int64)
        return _beaten_at_one_time(apart, _ranks(cost), _ranks(level))
    ranks = np.stack([_ranks(level) for level in levels.T])
    order = np.lexsort((ranks.sum(axis=0), _ranks(cost)))
    beats = np.triu(np.equal.outer(apart[order], apart[order]))
    for rank in ranks[:, order]:
        beats &= np.less_equal.outer(rank, rank)
    found = np.empty(count, dtype=np.int64)
    # The first that beats a state is beaten by no other, which would be an earlier one.
    found[order] = order[beats.argmax(axis=0)] if count else order
    return found


def _beaten_at_one_time(apart: IntArray, cost: IntArray, level: IntArray) -> IntArray:
    """The same where amounts are numbers: along rising usage only a lower cost is worth it."""
    count = len(cost)
    order = np.lexsort((cost, level, apart))
    # Costs of a later group are below all of an earlier one, so that the running minimum begins anew there.
    falling = cost[order] - apart[order] * (count + 1)
    survives: BoolArray = np.ones(count, dtype=np.bool_)
    survives[1:] = falling[1:] < np.minimum.accumulate(falling)[:-1]
    last = np.maximum.accumulate(np.where(survives, np.arange(count), 0))
    found = np.empty(count, dtype=np.int64)
    found[order] = order[last]
    return found


def _ranks(values: Integers) -> IntArray:
    return np.unique(values, return_inverse=True)[1].reshape(-1).astype(np.int64)


def _ranks_of_rows(rows: IntArray) -> IntArray:
    if not rows.size:
        return np.zeros(len(rows), dtype=np.int64)
    return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1).astype(np.int64)
