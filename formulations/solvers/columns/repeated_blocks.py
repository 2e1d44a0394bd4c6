"""Repeated blocks of a problem: which nodes are the same decision in one layer after another.

A deep model lists its layers one after another, so equal nodes follow each other at a constant distance: forward
from the first layer to the last, backward from the last to the first, weights and holds in sequences of their own.
Such a stretch is a *run*; the nodes at one place of its period are an *orbit*. Factors between orbits say which
repetition of one run belongs to which of the other, so that every node of an orbit has a *position*: the number of its
block.

What is found is a guess about structure that others may use as they like; nothing depends on its being right.
"""

from __future__ import annotations

import hashlib
import heapq
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formulations.problem.strategy_problem import BoolArray, IntArray, StrategyProblem
from formulations.solvers.columns.tunables import LEAST_REPETITIONS, REPEATED_WINDOW, TRIED_PERIODS


@dataclass(frozen=True, slots=True, eq=False)
class Repeats:
    """Nodes by family, orbit and position; arrays of shape ``(nodes,)``.

    Parameters
    ----------
    family
        Number of the stack of blocks (an encoder is one, a decoder another), or -1 for a node of no orbit.
    orbit
        Number of the orbit, unique over all families, or -1.
    position
        Number of the block within its family; neighbouring blocks have neighbouring numbers.
    """

    family: IntArray
    orbit: IntArray
    position: IntArray

    @property
    def count(self) -> int:
        """Nodes that are of an orbit."""
        return int(np.count_nonzero(self.orbit >= 0))


@dataclass(frozen=True, slots=True)
class _Run:
    """Nodes at a constant distance: ``nodes[q * period + o]`` is repetition ``q`` of orbit ``o``."""

    nodes: tuple[int, ...]
    period: int


def find_repeats(problem: StrategyProblem) -> Repeats:
    """Find runs in the order of the nodes, and align them with one another."""
    open_nodes = [i for i, node in enumerate(problem.nodes) if node.size > 1]
    names = _signatures(problem)
    runs = [
        _Run(tuple(open_nodes[first:end]), period)
        for first, end, period in _periodic_stretches([names[i] for i in open_nodes])
    ]
    return _Alignment(problem, runs).repeats()


def _signatures(problem: StrategyProblem) -> list[int]:
    """Number the nodes so that equal numbers mean equal tables, of the node and of the factors around it."""
    contents = _Contents()
    around: list[list[tuple[int, int]]] = [[] for _ in problem.nodes]
    for factor in problem.factors:
        table = contents.number(factor.cost)
        for axis, i in enumerate(factor.scope):
            around[i].append((table, axis))
    known: dict[tuple[object, ...], int] = {}
    return [
        known.setdefault((contents.number(node.cost), *sorted(tables)), len(known))
        for node, tables in zip(problem.nodes, around, strict=True)
    ]


class _Contents:
    """Numbers arrays by content; arrays that are one object are read once."""

    def __init__(self) -> None:
        self._by_id: dict[int, int] = {}
        self._by_content: dict[tuple[object, ...], int] = {}

    def number(self, table: NDArray[Any]) -> int:
        """Return the number of all arrays that equal this one, which must stay alive."""
        if id(table) not in self._by_id:
            content = hashlib.blake2b(np.ascontiguousarray(table).data, digest_size=16).digest()
            self._by_id[id(table)] = self._by_content.setdefault((table.shape, content), len(self._by_content))
        return self._by_id[id(table)]


def _periodic_stretches(names: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return disjoint stretches (first, end, period) of whole periods; longer ones, then shorter periods come first."""
    sequence = np.array(names, dtype=np.int64)
    free = np.ones(len(names), dtype=np.bool_)
    waiting: list[tuple[int, int, int, int]] = []

    def look(period: int, first: int, end: int) -> None:
        for start, stop in _stretches(sequence[first:end], period, free[first:end]):
            if stop - start >= LEAST_REPETITIONS * period:
                heapq.heappush(waiting, (start - stop, period, first + start, first + stop))

    for period in _likely_periods(names):
        look(period, 0, len(names))
    found: list[tuple[int, int, int]] = []
    while waiting:
        _, period, start, stop = heapq.heappop(waiting)
        if not free[start:stop].all():
            look(period, start, stop)
            continue
        end = stop - (stop - start) % period
        free[start:end] = False
        found.append((start, end, period))
    return found


def _stretches(sequence: IntArray, period: int, free: BoolArray) -> list[tuple[int, int]]:
    """Return longest stretches (start, end) of free nodes, each equal to the one a period before it."""
    if len(sequence) <= period:
        return []
    same = np.zeros(len(sequence) + 1, dtype=np.bool_)
    same[period:-1] = (sequence[period:] == sequence[:-period]) & free[period:] & free[:-period]
    ends = np.flatnonzero(same[1:] != same[:-1]) + 1
    return [(start - period, end) for start, end in ends.reshape(-1, 2).tolist()]


def _likely_periods(names: Sequence[int]) -> list[int]:
    """Distances from windows to the last equal ones, the most frequent first."""
    last: dict[tuple[int, ...], int] = {}
    distances: Counter[int] = Counter()
    for i in range(len(names) - REPEATED_WINDOW + 1):
        window = tuple(names[i : i + REPEATED_WINDOW])
        if window in last:
            distances[i - last[window]] += 1
        last[window] = i
    return [distance for distance, _ in distances.most_common(TRIED_PERIODS)]


class _Alignment:
    """Gives every orbit of all runs its positions, by the factors between them."""

    def __init__(self, problem: StrategyProblem, runs: list[_Run]) -> None:
        count = len(problem.nodes)
        self.orbit: IntArray = np.full(count, -1, dtype=np.int64)
        self.family: IntArray = np.full(count, -1, dtype=np.int64)
        self.position: IntArray = np.zeros(count, dtype=np.int64)
        self.members: list[tuple[int, ...]] = []
        self.run_of: list[int] = []
        self.repetition: IntArray = np.zeros(count, dtype=np.int64)
        self.weight = [sum(problem.nodes[i].size for i in run.nodes) for run in runs]
        for r, run in enumerate(runs):
            for o in range(run.period):
                nodes = run.nodes[o :: run.period]
                self.orbit[list(nodes)] = len(self.members)
                self.repetition[list(nodes)] = np.arange(len(nodes))
                self.members.append(nodes)
                self.run_of.append(r)
        self.links = self._links(problem)
        self.falls = self._falling()

    def _links(self, problem: StrategyProblem) -> dict[int, list[tuple[int, int]]]:
        """Per orbit the pairs (own node, other node) that share a factor, the other in another orbit."""
        links: dict[int, list[tuple[int, int]]] = defaultdict(list)
        for factor in problem.factors:
            within = [i for i in factor.scope if self.orbit[i] >= 0]
            for i, j in combinations(within, 2):
                if self.orbit[i] != self.orbit[j]:
                    links[int(self.orbit[i])].append((i, j))
                    links[int(self.orbit[j])].append((j, i))
        return links

    def _falling(self) -> dict[tuple[int, int], bool]:
        """Whether the repetitions of two runs count in opposite directions, per pair of runs."""
        sums: dict[tuple[int, int], dict[tuple[int, int, int], int]] = defaultdict(lambda: defaultdict(int))
        for orbit, pairs in self.links.items():
            for i, j in pairs:
                runs = self.run_of[orbit], self.run_of[self.orbit[j]]
                for sign in (1, -1):
                    line = int(self.repetition[i] - sign * self.repetition[j])
                    sums[runs][(int(self.orbit[j]) * len(self.members) + orbit, sign, line)] += 1
        falls = {}
        for runs, lines in sums.items():
            # The square tells a line with many links from many lines with one each.
            score = {sign: sum(n * n for (_, s, _), n in lines.items() if s == sign) for sign in (1, -1)}
            falls[runs] = score[-1] > score[1]
        return falls

    def repeats(self) -> Repeats:
        """Place the heaviest run of every family, then one orbit after another where most links want it."""
        direction: dict[int, int] = {}
        families = 0
        for root in sorted(range(len(self.weight)), key=lambda r: -self.weight[r]):
            if root in direction:
                continue
            direction[root] = 1
            placed = [o for o, r in enumerate(self.run_of) if r == root]
            votes: dict[int, Counter[int]] = defaultdict(Counter)
            for orbit in placed:
                self._place(orbit, 0, 1, families)
            for orbit in placed:
                self._vote(orbit, direction, votes)
            while votes:
                orbit = max(votes, key=lambda o: votes[o].most_common(1)[0][1])
                run = self.run_of[orbit]
                self._place(orbit, votes.pop(orbit).most_common(1)[0][0], direction[run], families)
                self._vote(orbit, direction, votes)
            families += 1
        self._place_unlinked(direction)
        return Repeats(self.family, self.orbit, self.position)

    def _place_unlinked(self, direction: dict[int, int]) -> None:
        """Place orbits that no factor links to a placed one beside the others of their run."""
        for orbit, run in enumerate(self.run_of):
            if self.family[self.members[orbit][0]] < 0:
                beside = next(
                    nodes[0]
                    for nodes, r in zip(self.members, self.run_of, strict=True)
                    if r == run and self.family[nodes[0]] >= 0
                )
                sign = direction[run]
                offset = int(self.position[beside] - sign * self.repetition[beside])
                self._place(orbit, offset, sign, int(self.family[beside]))

    def _place(self, orbit: int, offset: int, sign: int, family: int) -> None:
        nodes = list(self.members[orbit])
        self.position[nodes] = offset + sign * self.repetition[nodes]
        self.family[nodes] = family

    def _vote(self, orbit: int, direction: dict[int, int], votes: dict[int, Counter[int]]) -> None:
        """Let the links of a placed orbit say where the orbits around it belong."""
        own = self.run_of[orbit]
        for i, j in self.links[orbit]:
            other = int(self.orbit[j])
            run = self.run_of[other]
            if self.family[j] >= 0:
                continue
            if run not in direction:
                direction[run] = -direction[own] if self.falls[(own, run)] else direction[own]
            votes[other][int(self.position[i] - direction[run] * self.repetition[j])] += 1
