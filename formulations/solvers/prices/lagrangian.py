"""Memory prices over tree-reweighted messages: a proven bound and a good incumbent for large problems.

1. Raise the bound by prices on memory rows (:mod:`formulations.solvers.prices.ascent`); where the graph is
   narrow, go on with exact minimisation (:mod:`formulations.solvers.prices.bundle`).
2. At those prices decode, improve by random trees, repair greedily and fill what is left
   (:mod:`formulations.solvers.local_search.incumbent_search`). Then walk: the same from the last assignment, at prices
   that weigh differently from region to region (:mod:`formulations.solvers.prices.regions`), and now and then from one
   decoded by decimation (:mod:`formulations.solvers.prices.decimation`).
3. Intensify: perturb the incumbent at noisy prices within the limits.

The bound that is claimed is evaluated anew in exact integers (:mod:`formulations.solvers.prices.dual_bound`).
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np

from formulations.encodings.elimination import OutOfTimeError, TooWideError
from formulations.encodings.flat import FlatProblem, FloatArray
from formulations.encodings.priced_costs import expected_usage
from formulations.problem.compiled import seed_compiled
from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.problem.strategy_problem import IntArray, StrategyProblem
from formulations.solvers.local_search.incumbent_search import IncumbentSearch
from formulations.solvers.local_search.tunables import FORCED_STEPS
from formulations.solvers.prices.ascent import PriceAscent
from formulations.solvers.prices.bundle import PriceBundle
from formulations.solvers.prices.decimation import decimate
from formulations.solvers.prices.dual_bound import eliminated_bound
from formulations.solvers.prices.flatten_or_finish import flatten_or_finish
from formulations.solvers.prices.proven_bound import ProvenBound
from formulations.solvers.prices.raised_prices import raised_prices
from formulations.solvers.prices.regions import regional_bias
from formulations.solvers.prices.tunables import (
    ASCENT_SHARE,
    BUNDLE_ENTRIES,
    COOLING_SHARE,
    DECIMATION_BATCHES,
    FIRST_PAIRS,
    LAST_SHARE,
    PAIRS,
    PROOF_SPACING,
    RAISED_MASS,
    SHORT_ASCENT,
    START_FACTORS,
    STEPS_BETWEEN_CHECKS,
    TIGHTEN_SHARE,
    WALK_SHARE,
    WALKED_FACTORS,
    WALKED_ROUNDS,
)
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress

_BUNDLE = True
"""Technique: exact minimisation at prices by a bundle method, where the graph is narrow."""

_WALKING = True
"""Technique: phase 2, which walks from assignment to assignment at regional prices."""

_RESTARTS = True
"""Technique: phase 2 begins again and again, from what decimation decodes."""

_INTENSIFYING = True
"""Technique: phase 3, which rebuilds parts of the incumbent at noisy prices."""

_BOUNDING_SHARES = 0.6, 0.8
"""Not tunable: parts of the time after which ascent and bundle end where others look for assignments."""

_VISITS = 2
"""Not tunable: times that random trees visit every node in a round of phase 2, on average."""

_PATIENCE = 10
"""Not tunable: rebuilt assignments in a row that are no cheaper, after which an incumbent is left as it is."""

_BACK = 0.1
"""Not tunable: part of the rounds of phase 2 after which the next goes on from the best assignment; with 0.3 about the
same."""


def solve(problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent) -> Claim:
    """Solve by prices; stops early where the gap closes.

    With ``iteration_limit`` the solver makes that many price steps and as many search rounds, and is
    deterministic as long as the time limit does not cut it short.
    """
    started = time.monotonic()
    flat = flatten_or_finish(problem, incumbent)
    if isinstance(flat, Claim):
        return flat
    return PriceSearch(problem, flat, options, report, incumbent, started).run()


class PriceSearch:
    """One solve: the clock, the bound, the incumbent, and the phases in order."""

    def __init__(
        self,
        problem: StrategyProblem,
        flat: FlatProblem,
        options: SolveOptions,
        report: ReportProgress,
        incumbent: ReportIncumbent,
        started: float,
    ) -> None:
        self.problem = problem
        self.flat = flat
        self.options = options
        self.started = started
        self.rounds = 0
        self.prices: FloatArray = np.zeros(len(flat.usage.limit))
        self._improved_at = self.prices
        self._walked_to: IntArray | None = None
        self._ascent_share, self._tighten_share = ASCENT_SHARE, TIGHTEN_SHARE
        self._report = report
        self._incumbent = incumbent
        self._next_proof = PROOF_SPACING
        self._step_seconds = 0.0
        self._random = np.random.default_rng(options.seed)
        seed_compiled(options.seed)
        self.ascent = PriceAscent(flat)
        self.proven = ProvenBound(problem, self.ascent)
        self.search = IncumbentSearch(problem, flat, self._found, self._deadline(1.0))
        self._worst_total = sum(int(node.cost.max()) for node in problem.nodes)
        self._worst_total += sum(int(factor.cost.max()) for factor in problem.factors)

    def run(self, bounding: bool = False, most_steps: float = math.inf) -> Claim:
        """Run all phases and return the claim.

        Where ``bounding`` and the start is feasible, the time of the later phases goes to those that raise the bound;
        where others find something better meanwhile, later phases are left out. Where ``most_steps`` price steps end
        the first phase early, the later ones end earlier in proportion.
        """
        if self.options.initial_choices is not None:
            start = self.flat.flat_choices(self.options.initial_choices)
            if start is not None:
                self.search.finish(start, self.ascent.prices)
        others_search = bounding and self.search.best is not None
        if others_search:
            self._ascent_share, self._tighten_share = _BOUNDING_SHARES
        self._raise_bound(most_steps)
        self.proven.evaluate()
        self.prices = self.ascent.best_prices
        if _BUNDLE and not self._done():
            self._tighten()
        self._improved_at = self.prices
        if bounding:
            own = self.search.objective
            self.search.import_incumbent()
            others_search |= self.search.objective != own
        if not (others_search or self._done()):
            self.walk(self._deadline(WALK_SHARE))
        if not (others_search or self._done()):
            self._intensify()
        return self._claim()

    def go_on(self, time_limit: float) -> Claim:
        """From where :meth:`run` ended, raise the bound and intensify until ``time_limit`` seconds after the start."""
        self.options = replace(self.options, time_limit=time_limit)
        self.search.extend(self._deadline(1.0))
        midway = (time.monotonic() + self._deadline(1.0)) / 2
        if self.options.iteration_limit is None and not self._done():
            self.ascent.sweeps(PAIRS)
            while time.monotonic() < midway:
                self.ascent.step(1.0)
                if self.ascent.iterations % STEPS_BETWEEN_CHECKS == 0:
                    self._publish()
                    if self._done():
                        break
        if not self._done():
            self._intensify()
        return self._claim()

    def _claim(self) -> Claim:
        self.proven.evaluate()
        self._report(Progress(self._elapsed(), self.search.objective, self.proven.value, "lagrangian"))
        if self._infeasible():
            message = f"the bound {self.proven.value} is above the cost {self._worst_total} of any assignment"
            iterations = self.ascent.iterations
            return Claim(None, None, proved_infeasible=True, message=message, iterations=iterations, certified=True)
        best = self.search.best
        choices = None if best is None else self.flat.original_choices(best)
        return Claim(choices, self.proven.value, iterations=self.ascent.iterations + self.rounds)

    def _raise_bound(self, most_steps: float) -> None:
        """Phase 1: price steps, with a quick incumbent whenever their number has doubled."""
        limit = self.options.iteration_limit
        seconds = self._ascent_share * self.options.time_limit
        self.ascent.sweeps(FIRST_PAIRS)
        next_incumbent, stalled, last = 2, 0, self.ascent.best_bound
        before = self._elapsed()
        while not self._out_of_time(self._ascent_share) and (limit is None or self.ascent.iterations < limit):
            done = self.ascent.iterations
            if not len(self.flat.usage.limit) and stalled > SHORT_ASCENT:
                return
            if limit is None and done >= most_steps:
                self.options = replace(self.options, time_limit=self._elapsed() / self._ascent_share)
                return
            part = max(self._elapsed() / seconds, done / most_steps) / COOLING_SHARE
            progress = part if limit is None else done / limit
            self.ascent.step(progress)
            self._step_seconds = (self._elapsed() - before) / (done + 1)
            stalled = stalled + 1 if self.ascent.best_bound <= last + 1e-9 * abs(last) else 0
            last = max(last, self.ascent.best_bound)
            if self.ascent.iterations >= next_incumbent:
                next_incumbent *= 2
                self.search.finish(self.ascent.choices, self.ascent.prices)
            if self.ascent.iterations % STEPS_BETWEEN_CHECKS == 0:
                self._publish()
                if self._done():
                    return

    def _tighten(self) -> None:
        """On narrow graphs: raise the bound further by exact minimisation, whose minimisers are starts as well."""
        prices = self.ascent.best_prices
        mass = float(prices @ self.flat.usage.limit)
        change = 0.01 * max(mass, self.ascent.temperature_scale() * len(self.flat.graph.sizes))
        deadline = self._deadline(self._tighten_share)
        limit = self.options.iteration_limit
        try:
            bundle = PriceBundle(self.flat, prices, change, BUNDLE_ENTRIES, deadline)
            self.search.finish(bundle.choices, bundle.prices)
            last, steps = bundle.bound, 0
            while (limit is None or steps < limit) and not self._reached(bundle.bound) and bundle.improve():
                steps += 1
                if bundle.bound > last:
                    last = bundle.bound
                    self.prices = bundle.prices
                    self.search.finish(bundle.choices, bundle.prices)
        except TooWideError:
            return
        except OutOfTimeError:
            pass
        found = eliminated_bound(self.problem, self.flat, self.prices, self._deadline(1.0))
        if found is not None:
            self.proven.raise_to(found)
        self._publish()

    def walk(self, deadline: float) -> None:
        """Phase 2: from assignment to assignment, improved at prices that weigh differently from region to region.

        A new incumbent is rebuilt as long as that pays. Now and then the walk goes on from the incumbent, or from what
        decimation decodes. Until anything feasible is known, prices rise. It ends at ``deadline`` (of
        :func:`time.monotonic`), and a later call goes on from there.
        """
        if not _WALKING:
            return
        search, random = self.search, self._random
        last_restart = deadline - DECIMATION_BATCHES * self._step_seconds  # its sweeps are those of so many price steps
        if self._walked_to is None:
            self._walked_to = self._start(self.prices, deadline)
        risen = self.prices
        priced = expected_usage(self.flat, risen, self.ascent.best_messages)
        while time.monotonic() < deadline and not self._out_of_rounds(0.5):
            self.rounds += 1
            search.import_incumbent()
            known, prices = search.objective, random.uniform(*WALKED_FACTORS) * risen
            if _RESTARTS and self.rounds % WALKED_ROUNDS == 0 and time.monotonic() < last_restart:
                choices, bias = decimate(self.ascent, prices, random), None
            else:
                choices, bias = self._walked_to.copy(), regional_bias(priced, self.flat.graph.sizes, random)
            found = search.finish_grown(choices, prices, _VISITS, bias)
            if search.best is None:
                risen = self._raised(risen, search.usage(choices))
                priced = expected_usage(self.flat, risen, self.ascent.best_messages)
                search.force_feasible(choices, FORCED_STEPS, deadline)
            if search.best is not None and search.objective != known:
                self._improved_at = prices
                found = search.rebuild_while_better(search.best, prices, random, _PATIENCE)
            self._publish()
            if self._done():
                return
            if search.best is None:
                self._walked_to = choices
            elif found is None or random.random() < _BACK:
                self._walked_to = search.best
            else:
                self._walked_to = found

    def _raised(self, prices: FloatArray, usage: FloatArray) -> FloatArray:
        """Raise prices where the usage of an assignment exceeds limits."""
        limit = self.flat.usage.limit
        scale = self.ascent.temperature_scale() * len(self.flat.graph.sizes)
        return raised_prices(prices, usage, limit, RAISED_MASS * max(float(prices @ limit), 1e-3 * scale))

    def _start(self, prices: FloatArray, deadline: float) -> IntArray:
        """Decode at the prices and at some around them, improve by tree moves, and finish copies."""
        for factor in START_FACTORS if prices.any() else (1.0,):
            choices = self.ascent.decode(factor * prices, PAIRS)
            self.search.finish_grown(choices, factor * prices)
        if self.search.best is None:
            self.search.force_feasible(choices, FORCED_STEPS, deadline)
        return choices

    def _intensify(self) -> None:
        """Phase 3: rebuild parts of the incumbent at noisy prices, always within the limits."""
        if not _INTENSIFYING:
            return
        while self.search.best is not None and not self._out_of_time(LAST_SHARE) and not self._out_of_rounds(1.0):
            self.rounds += 1
            self.search.import_incumbent()
            prices = self._improved_at if self._random.random() < 0.5 else self.prices
            self.search.rebuild(self.search.best, prices, self._random)
            if self.rounds % STEPS_BETWEEN_CHECKS == 0 and self._done():
                return

    def _found(self, choices: tuple[int, ...], objective: int) -> None:
        self._incumbent(choices)
        self._report(Progress(self._elapsed(), objective, self.proven.value, "lagrangian"))

    def _publish(self) -> None:
        objective, floating = self.search.objective, self.ascent.best_bound
        # Now and then whatever the gap, so that a run that is cut short leaves a proven bound.
        due = self._elapsed() >= self._next_proof
        if due:
            self._next_proof = PROOF_SPACING * self._elapsed()
        if due or floating > self._worst_total or self._reached(floating + 1):
            self.proven.evaluate()
        self._report(Progress(self._elapsed(), objective, self.proven.value, "lagrangian"))

    def _reached(self, bound: float) -> bool:
        """Whether a bound would close the gap to the incumbent."""
        objective = self.search.objective
        return objective is not None and self.options.accepts(objective, bound)

    def _infeasible(self) -> bool:
        return self.proven.value is not None and self.proven.value > self._worst_total

    def _done(self) -> bool:
        if self._infeasible():
            return True
        known = self.proven.known
        return known is not None and self._reached(known)

    def _elapsed(self) -> float:
        return time.monotonic() - self.started

    def _deadline(self, share: float) -> float:
        return self.started + share * self.options.time_limit

    def _out_of_time(self, share: float) -> bool:
        return self._elapsed() >= share * self.options.time_limit

    def _out_of_rounds(self, share: float) -> bool:
        limit = self.options.iteration_limit
        return limit is not None and self.rounds >= share * limit
