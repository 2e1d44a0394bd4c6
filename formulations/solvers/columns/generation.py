"""Columns of repeated blocks: prices from one layer, a bound on all of them, and a mixture of what prices suggest.

A deep model repeats one block dozens of times, so that a search on the whole problem does the same work over and over.

1. Find the blocks (:mod:`formulations.solvers.columns.repeated_blocks`) and tie every second inner one of a family: a
   problem of a few blocks that uses memory as the whole one does. Its prices cost little
   (:mod:`formulations.solvers.columns.tied_prices`), and its best assignment is the first pattern.
2. From those prices and messages on, messages on the whole, untied problem give its bound, evaluated in exact integers.
3. Decode patterns at prices around them, each made to fit, and rebuild parts of each as long as that makes it cheaper.
   Where memory binds, tied layers can cost several times as much as the best plan; so these patterns are decoded from
   the whole problem. Where nothing is limited, layers mostly do best what all others do, and sweeps go on instead.
4. The restricted master (:mod:`formulations.solvers.columns.restricted_master`) mixes the patterns; further prices give
further ones.

It declines where nothing repeats.
"""

from __future__ import annotations

import time
from itertools import chain, repeat

import numpy as np

from formulations.encodings.flat import FlatProblem, FloatArray, flatten
from formulations.problem.compiled import seed_compiled
from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.problem.strategy_problem import BoolArray, StrategyProblem
from formulations.solvers.columns.repeated_blocks import find_repeats
from formulations.solvers.columns.restricted_master import mix_patterns, used_strategies
from formulations.solvers.columns.tied_prices import (
    FewRowsAscent,
    carry_messages_over,
    carry_over,
    inner_groups,
)
from formulations.solvers.columns.tied_problem import TiedProblem, TyingError, tie_nodes
from formulations.solvers.columns.tunables import (
    BOUND_SHARE,
    DEARER,
    FACTOR_NOISE,
    MASTER_SECONDS,
    MIXED_PATTERNS,
    MOST_PAIRS,
    PATTERNS_A_ROUND,
    VISITED_NODES,
)
from formulations.solvers.local_search.incumbent_search import IncumbentSearch
from formulations.solvers.prices.flatten_or_finish import flatten_or_finish
from formulations.solvers.prices.proven_bound import ProvenBound
from formulations.solvers.prices.tunables import LAST_SHARE, PAIRS, PATIENCE, SHORT_ASCENT, START_FACTORS
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress

_MIXING = True
"""Technique: the restricted master, which mixes patterns and the incumbent."""

_REBUILDING = True
"""Technique: parts of patterns are rebuilt at noisy prices, and the results are patterns too."""


def solve(problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent) -> Claim:
    """Solve by patterns; ends early where the gap closes or several rounds find nothing better.

    With ``iteration_limit`` the solver makes at most so many price steps and as many rounds, and is deterministic as
    long as the time limit does not cut it short.
    """
    started = time.monotonic()
    repeats = find_repeats(problem)
    if len(problem.nodes) and not repeats.count:
        return Claim(None, None, message="no blocks repeat, so that there are no patterns to share")
    flat = flatten_or_finish(problem, incumbent)
    if isinstance(flat, Claim):
        return flat
    try:
        tied = tie_nodes(problem, inner_groups(repeats))
    except TyingError as error:
        return Claim(None, None, message=str(error))
    return _Columns(problem, flat, options, report, incumbent, started).run(tied)


class _Columns:
    """One solve: the bound, the patterns, the incumbent."""

    def __init__(
        self,
        problem: StrategyProblem,
        flat: FlatProblem,
        options: SolveOptions,
        report: ReportProgress,
        incumbent: ReportIncumbent,
        started: float,
    ) -> None:
        self.problem, self.flat, self.options, self.started = problem, flat, options, started
        self._begun = time.monotonic()
        self.rounds = 0
        self._report, self._incumbent = report, incumbent
        self._random = np.random.default_rng(options.seed)
        seed_compiled(options.seed)
        self._ascent = FewRowsAscent(flat)
        self._proven = ProvenBound(problem, self._ascent)
        self._search = IncumbentSearch(problem, flat, self._found, self._deadline(LAST_SHARE))
        self._patterns: dict[tuple[int, ...], None] = {}
        self._mixed: BoolArray | None = None
        """Strategies whose mixtures are known: those of the last master that was solved to the end."""

    def run(self, tied: TiedProblem) -> Claim:
        """Prices from the tied problem, then rounds of patterns on the whole one."""
        if self.options.initial_choices is not None:
            self._search.offer_original(self.options.initial_choices)
        self._start_prices(tied)
        idle, base = 0.0, 1.0
        most_rounds = self.options.iteration_limit
        for factors in chain((START_FACTORS,), repeat(None)):
            if self._done() or idle >= PATIENCE or (most_rounds is not None and self.rounds >= most_rounds):
                break
            self.rounds += 1
            before = self._search.objective
            self._search.import_incumbent()
            if self.rounds > 1:
                self._ascent.step(1.0)
            self._decode(base * self._factors_of(factors, idle))
            self._prove()
            waited = 1.0 if self._mix() else 0.5
            idle = idle + waited if self._search.objective == before else 0.0
            base = base * DEARER if self._search.best is None else 1.0
        self._prove()
        best = self._search.best
        choices = None if best is None else self.flat.original_choices(best)
        message = f"{len(self._patterns)} patterns, {self.rounds} rounds"
        return Claim(choices, self._proven.value, message=message, iterations=self._ascent.iterations + self.rounds)

    def _start_prices(self, tied: TiedProblem) -> None:
        """Climb on the tied problem, and settle on the whole one at what that found."""
        flat = flatten(tied.problem)
        if not flat.contradiction:
            ascent = FewRowsAscent(flat)
            limit = self.options.iteration_limit
            ascent.climb(self._deadline(BOUND_SHARE / 2), *(() if limit is None else (limit,)))
            self._offer_tied(tied, ascent)
            prices = carry_over(flat, ascent.best_prices, self.flat)
            messages = carry_messages_over(flat, ascent.best_messages, self.flat, tied.group)
            self._ascent.start_from(prices, messages)
        is_limited = len(self.flat.usage.limit) > 0
        share, pairs = (BOUND_SHARE, PAIRS * SHORT_ASCENT) if is_limited else (LAST_SHARE, MOST_PAIRS)
        self._ascent.settle(self._deadline(share), self._is_enough, pairs)

    def _offer_tied(self, tied: TiedProblem, ascent: FewRowsAscent) -> None:
        """Offer the best assignment of the tied problem, decoded at its prices and improved."""
        search = IncumbentSearch(
            tied.problem, ascent.flat, lambda choices, _: self._search.offer_original(tied.lift(choices))
        )
        search.finish_grown(ascent.decode(ascent.best_prices, PAIRS), ascent.best_prices)

    def _is_enough(self, bound: float) -> bool:
        return self._search.objective is not None and self.options.accepts(self._search.objective, bound)

    def _factors_of(self, factors: tuple[float, ...] | None, idle: float) -> FloatArray:
        if not self._ascent.best_prices.any():
            return np.ones(1)
        if factors is not None:
            return np.array(factors)
        count = max(PATTERNS_A_ROUND, min(MIXED_PATTERNS // 2, self._rounds_of_nodes()))
        return np.exp(FACTOR_NOISE * (1 + idle) * self._random.standard_normal(count))

    def _decode(self, factors: FloatArray) -> None:
        """Decode a pattern at every factor of the best prices, and make it fit."""
        for factor in factors.tolist():
            if self._remaining() <= 0:
                return
            prices = self._ascent.best_prices * factor
            choices = self._ascent.decode(prices, PAIRS)
            self._patterns[self.flat.original_choices(choices)] = None
            finished = self._search.finish_grown(choices, prices)
            if finished is not None and _REBUILDING:
                best_prices = self._ascent.best_prices
                patience = (self._rounds_of_nodes() + 1) // 2  # each round visits a node about twice
                rebuilt = self._search.rebuild_while_better(finished, best_prices, self._random, patience)
                self._patterns[self.flat.original_choices(rebuilt)] = None

    def _rounds_of_nodes(self) -> int:
        """How often the nodes that a round may visit make up all nodes: the effort does not grow with their number."""
        return VISITED_NODES // max(1, len(self.problem.nodes))

    def _mix(self) -> bool:
        """Let the master mix the newest patterns and the incumbent; False where it has done so already."""
        if self._done() or not _MIXING:
            return True
        start = None if self._search.best is None else self.flat.original_choices(self._search.best)
        patterns = list(self._patterns)[-MIXED_PATTERNS:]
        if start is not None:
            patterns.append(start)
            self._patterns[start] = None
        used = used_strategies(self.problem, patterns)
        if self._mixed is not None and not (used & ~self._mixed).any():
            return False
        deadline = self._deadline(LAST_SHARE)
        if self.options.iteration_limit is None:  # with one, what is found must not depend on the machine's speed
            deadline = min(deadline, time.monotonic() + MASTER_SECONDS)
        found, is_complete = mix_patterns(self.problem, used, start, self.options, deadline)
        if is_complete:
            self._mixed = used
        if found is not None:
            self._search.offer_original(found)
        return True

    def _found(self, choices: tuple[int, ...], objective: int) -> None:
        self._incumbent(choices)
        self._report(Progress(self._elapsed(), objective, self._proven.value, "blocks"))

    def _prove(self) -> None:
        self._proven.evaluate()
        self._report(Progress(self._elapsed(), self._search.objective, self._proven.value, "blocks"))

    def _done(self) -> bool:
        if self._remaining() <= 0:
            return True
        objective, bound = self._search.objective, self._proven.known
        return objective is not None and bound is not None and self.options.accepts(objective, bound)

    def _elapsed(self) -> float:
        return time.monotonic() - self.started

    def _remaining(self) -> float:
        return self._deadline(LAST_SHARE) - time.monotonic()

    def _deadline(self, share: float) -> float:
        """End of a part of the time that laying the problem out has left."""
        return self._begun + share * (self.started + self.options.time_limit - self._begun)
