"""Exact enumeration of every assignment: slow, plain, and the reference for all other solvers."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.problem.strategy_problem import IntArray, ProblemError, StrategyProblem
from formulations.solvers.exact.tunables import CHUNK
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress

MAX_ASSIGNMENTS = 2_000_000
"""Not tunable: what the solver accepts."""

_INT64_SAFE_TOTAL = 2**62
"""Not tunable: sums below it fit int64."""


class TooManyAssignmentsError(ProblemError):
    """The problem has too many assignments to enumerate."""


def solve(problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent) -> Claim:
    """Enumerate all assignments; of several optima the lexicographically smallest is returned.

    Raises
    ------
    TooManyAssignmentsError
        If there are more than :data:`MAX_ASSIGNMENTS` assignments.
    """
    started = time.monotonic()
    count = math.prod(node.size for node in problem.nodes)
    if count > MAX_ASSIGNMENTS:
        raise TooManyAssignmentsError(
            f"problem {problem.name} has {count} assignments, brute force enumerates at most {MAX_ASSIGNMENTS}; "
            "use another solver"
        )
    best: tuple[int, tuple[int, ...]] | None = None
    for first in range(0, count, CHUNK):
        if time.monotonic() - started > options.time_limit:
            choices = best[1] if best else None
            return Claim(choices, None, message=f"time limit after {first} of {count} assignments", iterations=first)
        found = _best_in_chunk(problem, np.arange(first, min(first + CHUNK, count)))
        if found is not None and (best is None or found[0] < best[0]):
            best = found
            incumbent(best[1])
    if best is None:
        return Claim(None, None, proved_infeasible=True, message="no assignment is feasible", iterations=count)
    report(Progress(time.monotonic() - started, best[0], best[0], "brute_force"))
    return Claim(best[1], best[0], iterations=count)


def _best_in_chunk(problem: StrategyProblem, numbers: IntArray) -> tuple[int, tuple[int, ...]] | None:
    """Cheapest feasible assignment among those numbered ``numbers`` in mixed radix, first node first."""
    choices = _decode(problem, numbers)
    allowed = np.ones(len(numbers), dtype=bool)
    tables = [node.cost for node in problem.nodes] + [factor.cost for factor in problem.factors]
    total: NDArray[Any] = np.zeros(len(numbers), dtype=_dtype_for(tables))
    for scope, cost, forbidden in _tables(problem):
        entry = tuple(choices[i] for i in scope)
        total += cost[entry].astype(total.dtype)
        if forbidden is not None:
            allowed &= ~forbidden[entry]
    for resource in range(len(problem.resources)):
        allowed &= _within_limit(problem, resource, choices, len(numbers))
    if not allowed.any():
        return None
    candidates = np.flatnonzero(allowed)
    best = candidates[np.argmin(total[candidates])]
    return int(total[best]), tuple(int(choice[best]) for choice in choices)


def _decode(problem: StrategyProblem, numbers: IntArray) -> list[IntArray]:
    choices = []
    remaining = numbers
    for node in reversed(problem.nodes):
        remaining, choice = np.divmod(remaining, node.size)
        choices.append(choice)
    return choices[::-1]


def _tables(problem: StrategyProblem) -> list[tuple[tuple[int, ...], IntArray, NDArray[np.bool_] | None]]:
    nodes = [((i,), node.cost, node.forbidden) for i, node in enumerate(problem.nodes)]
    return [*nodes, *((factor.scope, factor.cost, factor.forbidden) for factor in problem.factors)]


def _within_limit(problem: StrategyProblem, resource: int, choices: list[IntArray], count: int) -> NDArray[np.bool_]:
    limit = problem.resources[resource].limit
    terms = [(s, t) for s, t in problem.usage_terms() if t.resource == resource and t.start < t.end]
    if limit is None or not terms:
        return np.ones(count, dtype=bool)
    times = sorted({term.start for _, term in terms})
    usage: NDArray[Any] = np.zeros((len(times), count), dtype=_dtype_for([term.amount for _, term in terms]))
    for scope, term in terms:
        alive = slice(np.searchsorted(times, term.start), np.searchsorted(times, term.end))
        usage[alive] += term.amount[tuple(choices[i] for i in scope)].astype(usage.dtype)
    return np.asarray((usage <= limit).all(axis=0), dtype=np.bool_)


def _dtype_for(tables: list[IntArray]) -> type[np.int64] | type[np.object_]:
    largest = sum(max(abs(int(table.max())), abs(int(table.min()))) for table in tables)
    return np.int64 if largest < _INT64_SAFE_TOTAL else np.object_
