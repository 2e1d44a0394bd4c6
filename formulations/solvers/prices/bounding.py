"""Memory prices for the bound alone, where tables are so large that every sweep counts.

Where a pair of sweeps over the messages takes a good part of a second, prices need most of a solve to converge, and a
search for assignments beside them is better made by another process. This search takes their incumbents
instead, and only raises the bound (:mod:`formulations.solvers.prices.ascent`).
"""

from __future__ import annotations

import time

from formulations.encodings.flat import FlatProblem
from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.local_search.incumbent_search import IncumbentSearch
from formulations.solvers.prices.ascent import PriceAscent
from formulations.solvers.prices.flatten_or_finish import flatten_or_finish
from formulations.solvers.prices.proven_bound import ProvenBound
from formulations.solvers.prices.tunables import (
    BOUND_SPACING_ALONE,
    COOLING_SHARE,
    FIRST_PAIRS,
    LARGE_ENTRIES,
    PROOF_SPACING,
    WIDE_TABLE,
)
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress


def is_wide(entries: int, factors: int) -> bool:
    """Return whether :class:`PriceBounding` suits a problem whose factors have so many entries in all."""
    return entries >= LARGE_ENTRIES and entries >= WIDE_TABLE * factors


def solve(problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent) -> Claim:
    """Raise the bound for the whole time; assignments are not looked for, and exact proofs are few."""
    started = time.monotonic()
    flat = flatten_or_finish(problem, incumbent)
    if isinstance(flat, Claim):
        return flat
    return PriceBounding(problem, flat, options, report, incumbent, started, BOUND_SPACING_ALONE).run()


class PriceBounding:
    """One ascent of the bound, which may go on later.

    Parameters
    ----------
    problem, flat
        The problem and its flat form, without contradiction.
    options
        Limits; with ``iteration_limit`` so many price steps are made in all.
    report, incumbent
        As for every solver.
    started
        When the clock of the time limit began to run, of :func:`time.monotonic`.
    spacing
        After how many steps a bound is proven first, and how many times as many come before the next.

    Attributes
    ----------
    ascent
        Prices, messages, and where the best bound was found.
    proven
        The best exact bound.
    search
        Holds the best assignment that others found.
    """

    def __init__(
        self,
        problem: StrategyProblem,
        flat: FlatProblem,
        options: SolveOptions,
        report: ReportProgress,
        incumbent: ReportIncumbent,
        started: float,
        spacing: float = PROOF_SPACING,
    ) -> None:
        self.ascent = PriceAscent(flat)
        self.proven = ProvenBound(problem, self.ascent)
        self._flat, self._options, self._report = flat, options, report
        self._started = started
        self.search = IncumbentSearch(problem, flat, lambda choices, _: incumbent(choices))
        self._next_proof = self._spacing = spacing
        if options.initial_choices is not None:
            self.search.offer_original(options.initial_choices)

    def run(self) -> Claim:
        """Begin, and raise the bound for the time that the options allow."""
        self.ascent.sweeps(FIRST_PAIRS)
        return self.go_on(self._options.time_limit)

    def go_on(self, time_limit: float) -> Claim:
        """Raise the bound further, until ``time_limit`` seconds after the start."""
        limit = self._options.iteration_limit
        seconds_of_proof = 0.0
        while self._elapsed() + seconds_of_proof < time_limit and (limit is None or self.ascent.iterations < limit):
            progress = self._progress()
            self.ascent.step(progress)
            if self.ascent.iterations >= self._next_proof:
                self._next_proof *= self._spacing
                before = time.monotonic()
                self._prove()
                seconds_of_proof = time.monotonic() - before
                if self._closed():
                    break
        self._prove()
        best = self.search.best
        choices = None if best is None else self._flat.original_choices(best)
        return Claim(choices, self.proven.value, iterations=self.ascent.iterations)

    def _progress(self) -> float:
        """Return how far the first part of the ascent is, in which prices cool: 1 at its end."""
        limit = self._options.iteration_limit
        if limit is not None:
            return self.ascent.iterations / limit
        return self._elapsed() / (COOLING_SHARE * self._options.time_limit)

    def _prove(self) -> None:
        """Evaluate the best prices and messages exactly, take incumbents of others, and report."""
        self.search.import_incumbent()
        self.proven.evaluate()
        self._report(Progress(self._elapsed(), self.search.objective, self.proven.value, "price_bounding"))

    def _closed(self) -> bool:
        objective, bound = self.search.objective, self.proven.known
        return objective is not None and bound is not None and self._options.accepts(objective, bound)

    def _elapsed(self) -> float:
        return time.monotonic() - self._started
