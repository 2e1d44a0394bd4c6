"""OSDP's own search: depth first over the modes of all operators, with the paper's two cuts (section 3.2, Algorithm 1).

A branch is cut where its memory is over the limit, or its time is not below the best plan's so far. Both cuts look at
the operators that have a mode, and at nothing else: what the others need at the least is not added. So up to all
:math:`M^n` vectors are visited: with 98 to 194 operators the search does not end, and the order in which modes are
tried determines the plan found in time. At the peak (:class:`~formulations.osdp.problem.Accounting`) a branch's memory
is the bytes that its operators hold and the largest temporary bytes of any, which never falls either.
(The authors' public code has a dynamic program over truncated megabytes in its place.) Variants carry labels:

- ``dfs`` tries the modes in the order in which the paper names them, DP first;
- ``dfs_sharded_first`` tries ZDP first, so that its first plan is FSDP's;
- ``dfs_grouped`` does the same, and breaks the symmetry of equal operators: a later one takes no mode that is tried
  before an earlier one's;
- ``dfs_look_ahead`` adds to both cuts the least that the remaining operators need.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from formulations.osdp.problem import Accounting, OperatorTable
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import BoolArray, IntArray
from formulations.problem.time_limit import is_over

_VECTORS_BETWEEN_LOOKS = 2_000_000
_NO_COST = 2**62


class Dfs(StrEnum):
    """Variants of the search; see the module."""

    PUBLISHED = "dfs"
    SHARDED_FIRST = "dfs_sharded_first"
    GROUPED = "dfs_grouped"
    LOOK_AHEAD = "dfs_look_ahead"


@dataclass(frozen=True, slots=True)
class DfsOutcome:
    """Result of a search at one batch size.

    Parameters
    ----------
    choices
        The index of every operator's mode in the best plan, or None.
    complete
        Whether all branches were visited or cut: then the plan is optimal, and without one nothing fits.
    visited
        Number of visited partial plans.
    """

    choices: tuple[int, ...] | None
    complete: bool
    visited: int


def search_depth_first(
    tables: Sequence[OperatorTable],
    batch: int,
    memory_bytes: int,
    variant: Dfs,
    time_limit: float,
    accounting: Accounting = Accounting.PUBLISHED,
) -> DfsOutcome:
    """Search at one batch size.

    Parameters
    ----------
    tables
        Of every operator.
    batch
        Samples on one device.
    memory_bytes
        What tensors may take on one device.
    variant
        Which search.
    time_limit
        Seconds after which the best plan so far is returned.
    accounting
        As in the settings that made the tables.
    """
    deadline = time.monotonic() + time_limit
    places = _by_kind(tables) if variant is Dfs.GROUPED else list(range(len(tables)))
    modes = np.arange(max(len(table.modes) for table in tables))
    if variant in (Dfs.SHARDED_FIRST, Dfs.GROUPED):
        modes = modes[::-1]
    cost = np.array([_filled(tables[i].communication, modes, _NO_COST) for i in places])
    resident, extra = (
        [each(tables[i], batch) for i in places] for each in (OperatorTable.resident, OperatorTable.extra)
    )
    if accounting is Accounting.PUBLISHED:
        resident = [held + more for held, more in zip(resident, extra, strict=True)]
        extra = [np.zeros_like(more) for more in extra]
    memory, temporary = (np.array([_filled(each, modes, memory_bytes + 1) for each in of]) for of in (resident, extra))
    equal_before = np.zeros(len(places), dtype=np.bool_)
    if variant is Dfs.GROUPED:
        equal_before[1:] = np.logical_and.reduce([(a[1:] == a[:-1]).all(axis=1) for a in (cost, memory, temporary)])
    rest = np.zeros((2, len(places) + 1), dtype=np.int64)
    if variant is Dfs.LOOK_AHEAD:
        least = np.array([cost.min(axis=1), memory.min(axis=1)])
        rest[:, :-1] = np.cumsum(least[:, ::-1], axis=1)[:, ::-1]
    state = _start(len(places))
    complete, visited = False, 0
    while not complete and not is_over(deadline):
        complete = _visit(cost, memory, temporary, equal_before, rest, memory_bytes, *state, _VECTORS_BETWEEN_LOOKS)
        visited = int(state[0][2])
    if state[0][1] == _NO_COST:
        return DfsOutcome(None, complete, visited)
    choices = [0] * len(places)
    for place, chosen in zip(places, state[-1].tolist(), strict=True):
        choices[place] = int(modes[chosen])
    return DfsOutcome(tuple(choices), complete, visited)


def warm_up_osdp() -> None:
    """Compile the loop of the searches; :mod:`formulations.warm_up` calls it at installation."""
    none = np.zeros((2, 2), dtype=np.int64)
    state = _start(2)
    alone, rest = np.zeros(2, dtype=np.bool_), np.zeros((2, 3), dtype=np.int64)
    _visit(none, none, none, alone, rest, 0, *state, _VECTORS_BETWEEN_LOOKS)


def _filled(figures: IntArray, modes: IntArray, missing: int) -> IntArray:
    """Figures in the order in which modes are tried; ``missing`` for modes that an operator has not."""
    result = np.full(len(modes), missing, dtype=np.int64)
    result[: len(figures)] = figures
    return result[modes]


def _by_kind(tables: Sequence[OperatorTable]) -> list[int]:
    """Operators with equal ones behind each other."""
    kinds: dict[tuple[object, ...], int] = {}
    keys = [
        (t.communication.tobytes(), (t.fixed_resident + t.gathered).tobytes(), t.sample_resident, t.temporary)
        for t in tables
    ]
    for key in keys:
        kinds.setdefault(key, len(kinds))
    return sorted(range(len(tables)), key=lambda i: kinds[keys[i]])


def _start(operators: int) -> tuple[IntArray, IntArray, IntArray, IntArray, IntArray, IntArray]:
    """Depth, best cost, visits; by depth the next mode, cost, bytes held and largest temporary ones; the best plan."""
    progress = np.array([0, _NO_COST, 0], dtype=np.int64)
    next_mode, spent, used, top, best = (np.zeros(operators, dtype=np.int64) for _ in range(5))
    return progress, next_mode, spent, used, top, best


@compiled
def _visit(
    cost: IntArray,
    memory: IntArray,
    temporary: IntArray,
    equal_before: BoolArray,
    rest: IntArray,
    limit: int,
    progress: IntArray,
    next_mode: IntArray,
    spent: IntArray,
    used: IntArray,
    top: IntArray,
    best: IntArray,
    visits: int,
) -> bool:
    """Visit so many more partial plans, from where the last call stopped; True where none is left.

    ``cost``, ``memory`` and ``temporary`` have shape ``(n, M)``; ``rest`` is the least cost and memory of the operators
    from each one on, shape ``(2, n + 1)``. All arguments after ``limit`` are state, changed in place.
    """
    last = len(cost) - 1
    modes = cost.shape[1]
    depth, least, visited = progress[0], progress[1], 0
    while depth >= 0 and visited < visits:
        mode = next_mode[depth]
        if mode == modes:
            depth -= 1
            continue
        next_mode[depth] = mode + 1
        visited += 1
        now_used = used[depth] + memory[depth, mode]
        now_top = max(top[depth], temporary[depth, mode])
        if now_used + now_top + rest[1, depth + 1] > limit:
            continue
        now_spent = spent[depth] + cost[depth, mode]
        if now_spent + rest[0, depth + 1] >= least:
            continue
        if depth == last:
            least = now_spent
            best[:] = next_mode - 1
            continue
        depth += 1
        used[depth], spent[depth], top[depth] = now_used, now_spent, now_top
        next_mode[depth] = mode if equal_before[depth] else 0
    progress[0], progress[1] = depth, least
    progress[2] += visited
    return bool(depth < 0)
