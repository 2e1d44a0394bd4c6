"""Simulated annealing from an incumbent, within the limits (Kirkpatrick, Gelatt and Vecchi 1983).

1. From the strategies that hold least, one hot cycle (see 3): a good incumbent within seconds.
2. :mod:`formulations.solvers.prices.lagrangian` for part of the time: prices, and perhaps a better incumbent.
3. Unless the bound is close then: cycle after cycle the incumbent is heated and cooled again, by heat-bath draws of
   single nodes (:mod:`formulations.solvers.huge_tables.heat_bath`), or by moves of hubs together with their neighbours
   (:mod:`formulations.solvers.huge_tables.hub_moves`). While it is hot, memory has its price, or a part of it; at the
   end it has none, and single moves fill what is left. Some cycles consist of random trees at noisy prices alone.

How hot a cycle begins is drawn at random, or near where the last better assignment was found. Where nodes have over a
hundred strategies and hubs hundreds of neighbours, this finds in seconds what trees and exact parts miss.
"""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise

import numpy as np

from formulations.encodings.flat import FlatProblem, FloatArray
from formulations.problem.compiled import seed_compiled
from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.problem.strategy_problem import IntArray, StrategyProblem
from formulations.solvers.huge_tables.heat_bath import fields_of, heat_bath, held_over_time, mirrored
from formulations.solvers.huge_tables.hub_branching import hubs
from formulations.solvers.huge_tables.hub_moves import move_hubs
from formulations.solvers.huge_tables.tunables import (
    ANNEALING_FIRST_SHARE,
    ANNEALING_START_SHARE,
    CLOSE,
    COLDEST,
    COOLING_OF_A_LEVEL,
    DRAWS_OF_A_NODE,
    HOTTEST,
    LARGEST_TREE,
    LENGTHS,
    LEVEL_CURIOSITY,
    LEVELS,
    MOVED_HUBS,
    MOVES_OF_A_HUB,
    PRICED_SHARE,
    PRICED_TEMPERATURES,
    RESUMING,
    SMALLEST_TREE,
    TEMPERATURES,
)
from formulations.solvers.local_search.incumbent_search import IncumbentSearch
from formulations.solvers.local_search.moves import add_prices
from formulations.solvers.local_search.tunables import FILL_FACTORS, FORCED_STEPS
from formulations.solvers.prices.flatten_or_finish import flatten_or_finish
from formulations.solvers.prices.lagrangian import PriceSearch
from formulations.solvers.prices.proven_bound import ProvenBound
from formulations.solvers.prices.tunables import LAST_SHARE
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress

SOURCE = "annealing"

NODES, HUBS, TREES = "nodes", "hubs", "trees"
"""What moves in a cycle."""

_SHARES = {"nodes": 0.7, "hubs": 0.15, "trees": 0.15}
"""Techniques: how many of the cycles are of a kind, where a problem has hubs."""


def solve(problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent) -> Claim:
    """Improve an assignment by annealing.

    With ``iteration_limit`` that many cycles are run, after as many steps of the first phase, and the result is
    deterministic as long as the time limit does not cut it short.
    """
    started = time.monotonic()
    flat = flatten_or_finish(problem, incumbent)
    if isinstance(flat, Claim):
        return flat

    def forward(progress: Progress) -> None:
        report(replace(progress, source=SOURCE))

    start = replace(options, time_limit=ANNEALING_START_SHARE * options.time_limit)
    first = PriceSearch(problem, flat, start, forward, incumbent, started)
    annealing = Annealing(flat, first.search, options)
    if options.initial_choices is None:
        annealing.begin(started + ANNEALING_FIRST_SHARE * options.time_limit)
    claim = first.run()
    objective, bound = first.search.objective, first.proven.known
    if objective is None or bound is None or claim.proved_infeasible:
        return claim
    if objective - bound <= CLOSE * abs(objective):
        return replace(claim, message="too close to the bound for annealing")
    first.search.extend(started + options.time_limit)
    annealing.prices = first.ascent.best_prices
    annealing.run(started + LAST_SHARE * options.time_limit, first.proven)
    assert first.search.best is not None
    message = f"{annealing.cycles} cycles"
    return Claim(flat.original_choices(first.search.best), claim.bound, message=message, iterations=annealing.cycles)


class Annealing:
    """Cycles from the incumbent of a search on.

    Parameters
    ----------
    flat
        The flat problem, without contradiction.
    search
        Holds the incumbent, checks what is offered and reports it.
    options
        Limits and seed of the whole.

    Attributes
    ----------
    prices
        Of rows, cost per unit of usage; zero until better ones are set.
    cycles
        Run so far.
    """

    def __init__(self, flat: FlatProblem, search: IncumbentSearch, options: SolveOptions) -> None:
        self.cycles = 0
        self.prices: FloatArray = np.zeros(len(flat.usage.limit))
        self._flat, self._search, self._options = flat, search, options
        self._random = np.random.default_rng(options.seed)
        seed_compiled(options.seed)
        self._mirror = mirrored(flat.graph, flat.tables)
        self._unary, self._tables = flat.unary.copy(), flat.tables_to_price()
        self._hubs = hubs(flat)
        self._hub_moves = max(1, round(MOVES_OF_A_HUB * min(len(self._hubs), MOVED_HUBS) / TEMPERATURES))
        # What neighbours answer adds up like a random walk.
        degree = np.diff(flat.graph.incident_start)[self._hubs]
        self._spread_of_hubs = float(np.sqrt(np.median(degree))) if len(degree) else 1.0
        levels = {NODES: 4, HUBS: 7, TREES: 4} if len(self._hubs) else {NODES: 4, TREES: 4}
        self._levels = {kind: level for kind, level in levels.items() if kind in _SHARES}
        shares = np.array([_SHARES[kind] for kind in self._levels])
        self._shares = shares / shares.sum()
        self._result: IntArray | None = None

    def begin(self, deadline: float) -> None:
        """Run a hot cycle from the strategies that hold least, or what is feasible near them."""
        search, graph = self._search, self._flat.graph
        held = held_over_time(graph, self._flat.usage)
        least = [int(np.argmin(held[a:z])) for a, z in pairwise(graph.offset.tolist())]
        if search.force_feasible(np.array(least, dtype=np.int64), FORCED_STEPS, deadline) and search.best is not None:
            self._cycle(NODES, 0, deadline)

    def run(self, deadline: float, proven: ProvenBound) -> None:
        """Run cycles until the deadline (of :func:`time.monotonic`), or until the incumbent meets the bound."""
        limit = self._options.iteration_limit
        search = self._search
        while time.monotonic() < deadline and (limit is None or self.cycles < limit):
            search.hear_others()
            before = search.objective
            assert before is not None
            bound = proven.known
            if bound is not None and self._options.accepts(before, bound):
                return
            kind, level = self._next()
            self._cycle(kind, level, deadline)
            self.cycles += 1
            if search.objective != before:
                self._levels[kind] = level

    def _next(self) -> tuple[str, int]:
        """Return what moves in a cycle, and how cold it begins: 0 is the hottest."""
        kind = str(self._random.choice(list(self._levels), p=self._shares))
        if self._random.random() < LEVEL_CURIOSITY:
            return kind, int(self._random.integers(LEVELS))
        return kind, int(np.clip(self._levels[kind] + self._random.integers(-1, 2), 0, LEVELS - 1))

    def _cycle(self, kind: str, level: int, deadline: float) -> None:
        """Heat the incumbent, cool it, and offer what results."""
        search = self._search
        # Now and then on from where the last cycle ended, or all would end in the same valley.
        start = search.best if self._result is None or self._random.random() >= RESUMING else self._result
        assert start is not None
        choices = start.copy()
        usage_now = search.usage(choices)
        share = float(self._random.uniform(0.0, 1.2)) if kind == TREES or self._random.random() < PRICED_SHARE else 0.0
        hottest = HOTTEST * COOLING_OF_A_LEVEL**level
        if kind == TREES:
            self._grow_trees(choices, usage_now, share, hottest)
        else:
            self._anneal(kind, choices, usage_now, share, hottest, deadline)
        search.fill(choices, usage_now, self.prices, FILL_FACTORS[2:])
        self._result = choices

    def _grow_trees(self, choices: IntArray, usage_now: FloatArray, share: float, noise: float) -> None:
        """Improve by random trees at noisy prices."""
        noisy = share * self.prices * np.exp(noise * self._random.standard_normal(len(self.prices)))
        self._search.set_prices(noisy)
        self._search.improve(choices, usage_now, 1)
        largest = int(np.exp(self._random.uniform(np.log(SMALLEST_TREE), np.log(LARGEST_TREE))))
        self._search.grow_feasible_trees(choices, usage_now, 2 * len(choices), largest)

    def _anneal(
        self, kind: str, choices: IntArray, usage_now: FloatArray, share: float, hottest: float, deadline: float
    ) -> None:
        """Cool from the ``hottest`` temperature down, the last steps without prices."""
        flat = self._flat
        fields = self._fields(share, choices)
        unit = self._typical_distance(fields)
        length = int(self._random.choice(LENGTHS))
        for step, temperature in enumerate(np.geomspace(hottest, min(hottest, COLDEST), TEMPERATURES)):
            if step == PRICED_TEMPERATURES and share:
                fields = self._fields(0.0, choices)
            state = (self._tables, self._mirror, fields, choices, usage_now)
            if kind == HUBS:
                hot = unit * self._spread_of_hubs * float(temperature)
                cold = unit * COLDEST
                move_hubs(flat.graph, flat.usage, self._unary, *state, self._hubs, hot, cold, length * self._hub_moves)
                heat_bath(flat.graph, flat.usage, *state, cold, 1)
            else:
                heat_bath(flat.graph, flat.usage, *state, unit * float(temperature), length * DRAWS_OF_A_NODE)
            if time.monotonic() > deadline:
                break

    def _fields(self, share: float, choices: IntArray) -> FloatArray:
        """Set prices to a share of what they are; return the fields at them."""
        flat = self._flat
        prices = share * self.prices
        add_prices(flat.graph, flat.usage, prices, flat.unary, flat.tables, self._unary, self._tables)
        if self._tables is not flat.tables:
            self._mirror = mirrored(flat.graph, self._tables)
        return fields_of(flat.graph, self._unary, self._tables, self._mirror, choices)

    def _typical_distance(self, fields: FloatArray) -> float:
        """Return the median distance of a strategy from the best of its node."""
        graph = self._flat.graph
        distance = fields - np.repeat(np.minimum.reduceat(fields, graph.offset[:-1]), graph.sizes)
        typical = distance[(distance > 0.0) & (distance < 0.1 * self._flat.penalty)]
        return float(np.median(typical)) if len(typical) else 1.0
