"""Large-neighbourhood search: parts of the incumbent are solved again, all else fixed (Shaw 1998).

1. :mod:`formulations.solvers.prices.lagrangian` for part of the time: prices, a bound, and an incumbent, if the options
   or another solver do not bring a better one.
2. Again and again a neighbourhood (:mod:`formulations.solvers.improvement.neighbourhoods`) is cut out as a problem of
   its own (:mod:`formulations.solvers.improvement.subproblem`), reduced, and given to another solver for a few seconds.
   The kinds of neighbourhood share the time by what they gained per second; each has its own size, which grows where
   parts are solved quickly and shrinks where they are not solved in time.

A part that is the whole problem is given to the other solver as it is, and what that proves holds.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import numpy as np

from formulations.encodings.flat import FlatProblem, FloatArray
from formulations.encodings.priced_costs import PricedCosts
from formulations.presolve import presolve
from formulations.problem.compiled import seed_compiled
from formulations.problem.solution import Claim, Progress, SolveOptions, higher_bound
from formulations.problem.strategy_problem import IntArray, StrategyProblem
from formulations.solvers.improvement.neighbourhoods import Neighbourhoods, strategy_slacks
from formulations.solvers.improvement.subproblem import cut_out
from formulations.solvers.improvement.tunables import (
    COARSEST_GAP,
    CURIOSITY,
    FIRST_COLUMNS,
    GROWTH,
    LEAST_COLUMNS,
    MEMORY_OF_GAINS,
    MOST_PART_SECONDS,
    NEGLIGIBLE_GAP,
    PART_SHARE,
    QUICK_SHARE,
    START_SHARE,
)
from formulations.solvers.local_search.incumbent_search import IncumbentSearch, exact_objective
from formulations.solvers.prices.flatten_or_finish import flatten_or_finish
from formulations.solvers.prices.lagrangian import PriceSearch
from formulations.solvers.protocol.exchange import EXCHANGE
from formulations.solvers.protocol.registry import find_solver
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress, Solver

SOURCE = "large_neighbourhood"


def solve(
    problem: StrategyProblem,
    options: SolveOptions,
    report: ReportProgress,
    incumbent: ReportIncumbent,
    part_solver: str = "highs",
    first_columns: int = FIRST_COLUMNS,
) -> Claim:
    """Improve an assignment by solving parts of it again.

    With ``iteration_limit`` that many parts are solved, in turn of their kinds and at a fixed size, and the result
    is deterministic as long as the time limit does not cut it short.

    Parameters
    ----------
    part_solver
        The solver of the parts, by name: one that starts from ``initial_choices``. It runs in this process.
    first_columns
        Size of the first parts, in columns of their linear models.
    """
    started = time.monotonic()
    flat = flatten_or_finish(problem, incumbent)
    if isinstance(flat, Claim):
        return flat

    def forward(progress: Progress) -> None:
        report(replace(progress, source=SOURCE))

    start = replace(options, time_limit=START_SHARE * options.time_limit)
    prices = PriceSearch(problem, flat, start, forward, incumbent, started)
    claim = prices.run()
    if claim.proved_infeasible or _is_settled(problem, claim, options):
        return claim
    if claim.choices is None:
        claim = prices.go_on(options.time_limit)
        return replace(claim, message="no assignment to start from was found")
    ascent = prices.ascent
    search = PartSearch(
        problem, flat, prices.search, ascent.best_prices, ascent.best_messages, part_solver, options, first_columns
    )
    search.bound = claim.bound
    message = search.run(started + options.time_limit)
    assert prices.search.best is not None
    choices = flat.original_choices(prices.search.best)
    return Claim(choices, search.bound, message=message, iterations=search.rounds, claimed=search.claimed)


def _is_settled(problem: StrategyProblem, claim: Claim, options: SolveOptions) -> bool:
    """Whether a claim is as close to a bound, be it only claimed, as the options ask for."""
    bound = higher_bound(claim.bound, claim.claimed)
    if claim.choices is None or bound is None:
        return False
    return options.accepts(exact_objective(problem, claim.choices), bound)


@dataclass(slots=True)
class _Kind:
    """What is known of a kind of neighbourhood: its size in columns, and its gain per second of late."""

    name: str
    columns: int
    gain_per_second: float | None = None

    def learn(self, gain: float, seconds: float, finished: bool, limit: float) -> None:
        """Take account of one part: what it gained in ``seconds`` of at most ``limit``, and whether it was solved."""
        rate = gain / max(seconds, 1e-3)
        known = rate if self.gain_per_second is None else self.gain_per_second
        self.gain_per_second = MEMORY_OF_GAINS * known + (1 - MEMORY_OF_GAINS) * rate
        if not finished:
            self.columns = max(LEAST_COLUMNS, int(self.columns / GROWTH))
        elif seconds < QUICK_SHARE * limit:
            self.columns = int(GROWTH * self.columns)


class PartSearch:
    """The search from an incumbent on, whatever found it.

    Parameters
    ----------
    problem, flat
        The problem and its flat form, without contradiction.
    search
        Holds the incumbent, checks what is offered and reports it.
    prices, messages
        Of rows and factors, at which a bound was found; they tell which strategies cost more than the bound needs.
    part_solver, first_columns
        As for :func:`solve`.
    options
        Limits and seed of the whole.

    Attributes
    ----------
    bound
        The best bound proved here, or None.
    claimed
        The best bound that the other solver claims for the whole problem, or None.
    rounds
        Parts solved so far.
    """

    def __init__(
        self,
        problem: StrategyProblem,
        flat: FlatProblem,
        search: IncumbentSearch,
        prices: FloatArray,
        messages: FloatArray,
        part_solver: str,
        options: SolveOptions,
        first_columns: int = FIRST_COLUMNS,
    ) -> None:
        self.problem, self.flat, self.search, self.options = problem, flat, search, options
        self.bound: int | None = None
        self.claimed: int | None = None
        self.rounds = 0
        spec = find_solver(part_solver)
        self._solver: Solver = spec.load()
        self._is_built_in = spec.is_built_in
        self._random = np.random.default_rng(options.seed)
        seed_compiled(options.seed)
        costs = PricedCosts(flat)
        costs.set(prices)
        slack = strategy_slacks(flat.graph, costs.unary, costs.tables, messages)
        self.neighbourhoods = Neighbourhoods(flat, slack, self._random)
        self.kinds = [_Kind(name, first_columns) for name in self.neighbourhoods.kinds]
        part_seconds = PART_SHARE * options.time_limit
        self._part_seconds = min(MOST_PART_SECONDS, max(1.0, part_seconds))

    def run(self, deadline: float) -> str:
        """Solve parts until the deadline (of :func:`time.monotonic`) and return why the search ended."""
        limit = self.options.iteration_limit
        while time.monotonic() < deadline and (limit is None or self.rounds < limit):
            self.search.import_incumbent()
            if self._closed():
                return "the gap is closed"
            kind = self._next_kind()
            began, before = time.monotonic(), self.search.objective
            seconds = deadline - began if limit is not None else min(self._part_seconds, deadline - began)
            finished = self._step(kind, seconds)
            self.rounds += 1
            if limit is None and before is not None and self.search.objective is not None:
                kind.learn(before - self.search.objective, time.monotonic() - began, finished, seconds)
        return f"{self.rounds} parts"

    def _next_kind(self) -> _Kind:
        """Each kind in turn at first; then by gain per second, with some curiosity."""
        rates = [kind.gain_per_second for kind in self.kinds]
        if self.options.iteration_limit is not None or None in rates:
            return self.kinds[self.rounds % len(self.kinds)]
        gains = np.array(rates, dtype=np.float64)
        even = np.full(len(gains), 1.0 / len(gains))
        shares = gains / gains.sum() if gains.sum() > 0 else even
        return self.kinds[int(self._random.choice(len(gains), p=(1 - CURIOSITY) * shares + CURIOSITY * even))]

    def _step(self, kind: _Kind, seconds: float) -> bool:
        """Solve one part; return whether it was solved to the end."""
        deadline = time.monotonic() + seconds
        assert self.search.best is not None
        choices = self.search.best.copy()
        usage_now = self.search.usage(choices)
        nodes = self.neighbourhoods.draw(kind.name, choices, kind.columns)
        if len(nodes) == len(self.neighbourhoods.free):
            return self._solve_whole(choices, seconds)
        part = cut_out(self.flat, choices, usage_now, nodes)
        reduced = presolve(part.problem, deadline=deadline)
        start = reduced.lift.project(part.start)
        options = self._part_options(deadline - time.monotonic(), start, self._part_gap(reduced.problem, start))
        claim = self._solver(reduced.problem, options, _ignore, _ignore)
        if claim.choices is None:
            return False
        before = choices[part.nodes].copy()
        choices[part.nodes] = part.flat_choices(reduced.lift(claim.choices))
        if (choices[part.nodes] != before).any():
            self.search.offer(choices)
        return _is_settled(reduced.problem, claim, options)

    def _solve_whole(self, choices: IntArray, seconds: float) -> bool:
        """Give the problem itself to the other solver; its exact bound holds."""
        start = self.flat.original_choices(choices)
        claim = self._solver(
            self.problem,
            self._part_options(seconds, start, self.options.relative_gap),
            _ignore,
            self.search.offer_original,
        )
        if claim.choices is not None:
            self.search.offer_original(claim.choices)
        if not claim.proved_infeasible:
            self.bound = higher_bound(self.bound, claim.bound if self._is_built_in else None)
            self.claimed = higher_bound(self.claimed, higher_bound(claim.bound, claim.claimed))
        return self._closed()

    def _part_gap(self, part: StrategyProblem, start: tuple[int, ...] | None) -> float:
        """Return the relative gap of a part below which solving it further cannot close much of the whole gap."""
        bound = EXCHANGE.bound(self.problem, self.bound)
        if start is None or bound is None or self.search.objective is None:
            return 0.0
        cost = exact_objective(part, start)
        negligible = NEGLIGIBLE_GAP * (self.search.objective - bound)
        return min(COARSEST_GAP, negligible / cost) if cost > 0 else 0.0

    def _part_options(self, seconds: float, start: tuple[int, ...] | None, gap: float) -> SolveOptions:
        seed = int(self._random.integers(1 << 31))
        iterations = self.options.iteration_limit
        return SolveOptions(
            time_limit=max(0.01, seconds),
            seed=seed,
            relative_gap=gap,
            iteration_limit=iterations,
            initial_choices=start,
        )

    def _closed(self) -> bool:
        objective = self.search.objective
        bound = EXCHANGE.bound(self.problem, higher_bound(self.bound, self.claimed))
        return objective is not None and bound is not None and self.options.accepts(objective, bound)


def _ignore(_: object) -> None:
    """Drop reports of the solver of a part: its claim is enough."""
