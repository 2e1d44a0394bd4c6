"""Rows of memory: the (resource, time) pairs at which a limit can bind, and usage terms laid over them."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formulations.problem.strategy_problem import IntArray, StrategyProblem, UsageTerm

FloatArray = NDArray[np.float64]
_EXACT_IN_FLOAT = 2**52


@dataclass(frozen=True, slots=True, eq=False)
class RowMap:
    """From rows back to the problem.

    Parameters
    ----------
    resource, time
        Of every row.
    quantum
        Per resource the number of units that one unit of flat usage stands for (a power of two, 1
        unless totals would leave the exact range of float64).
    contradiction
        Where even the smallest usage of every table exceeds a limit: a sentence; else empty.
    """

    resource: IntArray
    time: IntArray
    quantum: tuple[int, ...]
    contradiction: str


@dataclass(slots=True, eq=False)
class _ResourceTerms:
    """The terms of one resource with their extremes; ``owner`` is a node, or -1 - factor."""

    owner: list[int]
    terms: list[UsageTerm]
    starts: IntArray
    ends: IntArray
    least: IntArray
    most: IntArray


UsageArrays = tuple[IntArray, IntArray, IntArray, IntArray, IntArray, FloatArray, FloatArray]


def build_rows(
    problem: StrategyProblem, node_terms: list[list[UsageTerm]], factor_terms: list[list[UsageTerm]]
) -> tuple[RowMap, UsageArrays]:
    """Choose rows and lay the terms over them.

    A time is a row only if something starts there, something ends at the next event (else a neighbouring
    time has at least its usage), and the largest usages together exceed the limit.

    Returns
    -------
    tuple
        The rows, and the arrays of :class:`formulations.encodings.flat.Usage` in its order.
    """
    row_resource: list[int] = []
    row_time: list[int] = []
    limits: list[float] = []
    quanta: list[int] = []
    contradiction = ""
    laid: dict[int, dict[tuple[int, int], FloatArray]] = {}
    for r, resource in enumerate(problem.resources):
        found = _terms_of(r, node_terms, factor_terms)
        quantum = 1
        if resource.limit is not None and found.terms:
            quantum = _quantum(found)
            times = _binding_times(found, resource.limit)
            contradiction = contradiction or _contradiction(problem, r, found)
            base = len(row_time)
            low = base + np.searchsorted(times, found.starts)
            high = base + np.searchsorted(times, found.ends)
            in_quanta = _Shared(lambda amount, by=quantum: (amount if by == 1 else amount // by).astype(np.float64))
            added = _Shared(np.add)
            for owner, term, a, b in zip(found.owner, found.terms, low.tolist(), high.tolist(), strict=True):
                if a < b:
                    amount = in_quanta(term.amount)
                    if quantum > 1 and not amount.any():
                        continue
                    intervals = laid.setdefault(owner, {})
                    intervals[(a, b)] = added(intervals[(a, b)], amount) if (a, b) in intervals else amount
            row_resource += [r] * len(times)
            row_time += times.tolist()
            limits += [float(min(resource.limit // quantum, _EXACT_IN_FLOAT))] * len(times)
        quanta.append(quantum)
    rows = RowMap(np.array(row_resource, np.int64), np.array(row_time, np.int64), tuple(quanta), contradiction)
    return rows, _lay_out(laid, len(node_terms), len(factor_terms), np.array(limits, dtype=np.float64))


class _Shared:
    """A function of arrays, cached by the identity of its arguments."""

    def __init__(self, function: Callable[..., FloatArray]) -> None:
        self._function = function
        self._known: dict[tuple[int, ...], tuple[tuple[NDArray[Any], ...], FloatArray]] = {}

    def __call__(self, *arrays: NDArray[Any]) -> FloatArray:
        key = tuple(map(id, arrays))
        if key not in self._known:
            # The arguments are kept, so that their ids cannot be used again.
            self._known[key] = (arrays, self._function(*arrays))
        return self._known[key][1]


def _terms_of(resource: int, node_terms: list[list[UsageTerm]], factor_terms: list[list[UsageTerm]]) -> _ResourceTerms:
    owned = itertools.chain(enumerate(node_terms), ((-1 - f, usage) for f, usage in enumerate(factor_terms)))
    found = [(k, t) for k, usage in owned for t in usage if t.resource == resource and t.start < t.end]
    position: dict[int, int] = {}
    amounts: list[IntArray] = []
    for _, term in found:
        if id(term.amount) not in position:
            position[id(term.amount)] = len(amounts)
            amounts.append(term.amount)
    of = np.array([position[id(term.amount)] for _, term in found], dtype=np.int64)
    sizes = np.array([amount.size for amount in amounts], dtype=np.int64)
    joined = np.concatenate([np.zeros(0, np.int64), *amounts])
    begins = np.cumsum(sizes) - sizes
    most = np.maximum.reduceat(joined, begins)[of] if found else joined
    least = np.minimum.reduceat(joined, begins)[of] if found else joined
    used = most > 0
    kept = list(itertools.compress(found, used.tolist()))
    starts = np.array([term.start for _, term in kept], dtype=np.int64)
    ends = np.array([term.end for _, term in kept], dtype=np.int64)
    return _ResourceTerms([k for k, _ in kept], [term for _, term in kept], starts, ends, least[used], most[used])


def _quantum(found: _ResourceTerms) -> int:
    total = int(found.most.sum(dtype=np.float64)) + 2 * len(found.terms)
    quantum = 1
    while total // quantum + len(found.terms) >= _EXACT_IN_FLOAT:
        quantum *= 2
    return quantum


def _binding_times(found: _ResourceTerms, limit: int) -> IntArray:
    starts, ends = np.unique(found.starts), np.unique(found.ends)
    events = np.union1d(starts, ends)
    following = events[np.searchsorted(events, starts, side="right")]
    candidates = starts[np.isin(following, ends)]
    horizon = int(ends[-1])
    most = found.most.astype(np.float64)
    change = np.zeros(horizon + 1)
    np.add.at(change, found.starts, most)
    np.subtract.at(change, found.ends, most)
    # Float sums of rounded integers: the margin keeps a time whose exact total is over the limit.
    margin = 1e-9 * float(most.sum())
    return candidates[np.cumsum(change)[candidates] > limit - margin].astype(np.int64)


def _contradiction(problem: StrategyProblem, resource: int, found: _ResourceTerms) -> str:
    """A sentence where the least usages together exceed the limit, in exact integers; else empty."""
    limit = problem.resources[resource].limit
    events: dict[int, int] = {}
    for start, end, least in zip(found.starts.tolist(), found.ends.tolist(), found.least.tolist(), strict=True):
        if least:
            events[start] = events.get(start, 0) + least
            events[end] = events.get(end, 0) - least
    usage = 0
    for time in sorted(events):
        usage += events[time]
        if limit is not None and usage > limit:
            name = problem.resources[resource].name
            return f"resource {name}: at time {time} at least {usage} is used, limit {limit}"
    return ""


def _lay_out(
    laid: dict[int, dict[tuple[int, int], FloatArray]], nodes: int, factors: int, limits: FloatArray
) -> UsageArrays:
    low: list[int] = []
    high: list[int] = []
    amount_start: list[int] = []
    pieces: list[FloatArray] = []
    laid_at: dict[int, int] = {}
    end = 0
    starts: list[list[int]] = []
    for owners in (range(nodes), (-1 - f for f in range(factors))):
        start = []
        for owner in owners:
            start.append(len(low))
            for (a, b), amount in laid.get(owner, {}).items():
                low.append(a)
                high.append(b)
                if id(amount) not in laid_at:
                    laid_at[id(amount)] = end
                    pieces.append(amount)
                    end += amount.size
                amount_start.append(laid_at[id(amount)])
        start.append(len(low))
        starts.append(start)
    amounts = np.concatenate(pieces) if pieces else np.zeros(0)
    as_int = [np.array(values, dtype=np.int64) for values in (*starts, low, high, amount_start)]
    return as_int[0], as_int[1], as_int[2], as_int[3], as_int[4], amounts, limits
