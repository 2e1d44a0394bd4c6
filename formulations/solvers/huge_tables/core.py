"""The core of an objective: what may be part of an assignment that costs at most so much, solved exactly.

Fixing by reduced cost (:mod:`formulations.solvers.prices.fixing`) leaves the less, the closer the objective is to the
bound. With the incumbent's cost the core holds all better assignments. Where that is too much, the core of a guess
between bound and incumbent is solved: if an assignment costs less than the guess, the cheapest one is the optimum; if
none does, the guess is a bound. Guesses rise as long as their cores are solved.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from formulations.encodings.flat import FlatProblem
from formulations.encodings.linear_model import linear_columns
from formulations.presolve import presolve
from formulations.presolve.workspace.allowed_strategies import cut_forbidden_strategies
from formulations.problem.solution import Claim, Progress, SolveOptions, higher_bound
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.branching import branch_and_bound
from formulations.solvers.exact import highs
from formulations.solvers.huge_tables.tunables import CLOSED_BY_CUTS, CORE_COLUMNS_A_SECOND, MOST_CORE_COLUMNS
from formulations.solvers.local_search.incumbent_search import exact_objective
from formulations.solvers.prices.ascent import PriceAscent
from formulations.solvers.prices.fixing import fix_by_reduced_cost
from formulations.solvers.protocol.exchange import EXCHANGE
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress

Choices = tuple[int, ...]

_FIXING = True
"""Technique: fixing by reduced cost before presolve makes the core."""


class Core:
    """Branch and bound on a core, in terms of the problem.

    Parameters
    ----------
    problem, flat, ascent
        The problem, its flat form, and the prices and messages by which it is judged.
    claim
        What is known of the problem: a bound, and perhaps an assignment.
    below
        Only assignments that cost less are of interest; at most the cost of the assignment known.
    report, incumbent, started
        As for every solver, and when its clock began to run.
    deadline
        When presolve ends (of :func:`time.monotonic`).

    Attributes
    ----------
    columns
        Columns of the core's linear model.
    """

    def __init__(
        self,
        problem: StrategyProblem,
        flat: FlatProblem,
        ascent: PriceAscent,
        claim: Claim,
        below: int,
        report: ReportProgress,
        incumbent: ReportIncumbent,
        started: float,
        deadline: float,
    ) -> None:
        hopeful = problem
        if _FIXING:
            hopeful = fix_by_reduced_cost(problem, flat, ascent.best_prices, ascent.best_messages, below)
        cut, self._cut = cut_forbidden_strategies(hopeful)
        reduced = presolve(cut, deadline=deadline)
        self.is_empty = bool(reduced.contradiction)
        self.problem, self._reduced, self._offset = reduced.problem, reduced.lift, reduced.offset
        self._claim, self._below = claim, below
        self._known = None if claim.choices is None else exact_objective(problem, claim.choices)
        self._best, self._choices, self._bound = self._known, claim.choices, claim.bound
        self._report, self._incumbent, self._started = report, incumbent, started

    @property
    def columns(self) -> int:
        """Columns of the core's linear model."""
        return 0 if self.is_empty else linear_columns(self.problem)

    def run(self, options: SolveOptions) -> Claim:
        """Search the core; return the better of what is known and what is found."""
        found = Claim(None, None, message="nothing is left")
        if self.is_empty:
            self._raise_bound(self._below - self._offset)
        else:
            start = None if self._claim.choices is None else self._project(self._claim.choices)
            options = replace(options, relative_gap=0.0, initial_choices=start)
            with EXCHANGE.translated(self.problem, self._project, self._offset):
                found = self._searched(options)
            self._raise_bound(found.bound)
        message = f"core of {len(self.problem.nodes)} nodes: {found.message}"
        iterations = self._claim.iterations + found.iterations
        return Claim(self._choices, self._bound, message=message, iterations=iterations)

    def _searched(self, options: SolveOptions) -> Claim:
        """Branch and bound, which begins from what cuts find where the gap is almost closed."""
        ends = time.monotonic() + options.time_limit
        known, objective = self._claim.bound, self._known
        if known is not None and objective == self._below and objective - known <= CLOSED_BY_CUTS * objective:
            first = highs.solve(self.problem, options, self._forward_progress, self._take)
            self._raise_bound(first.bound)
            seconds = max(0.0, ends - time.monotonic())
            options = replace(options, time_limit=seconds, iteration_limit=None)
            if first.choices is not None:
                options = replace(options, initial_choices=first.choices)
        below = self._below - self._offset
        return branch_and_bound.solve(self.problem, options, self._forward_progress, self._take, below=below)

    def _project(self, choices: Choices) -> Choices | None:
        """Choices of the core, or None where one was cut off."""
        kept = self._cut.project(choices)
        return None if kept is None else self._reduced.project(kept)

    def _raise_bound(self, bound: int | None) -> None:
        """Take a bound of the core; what lies outside costs at least as much as what is looked for."""
        own = None if bound is None else min(bound + self._offset, self._below)
        self._bound = higher_bound(self._bound, own)

    def _forward_progress(self, progress: Progress) -> None:
        self._raise_bound(progress.bound)
        self._report(Progress(time.monotonic() - self._started, self._best, self._bound, "price_and_branch"))

    def _take(self, choices: Choices) -> None:
        cost = exact_objective(self.problem, choices) + self._offset
        if self._best is None or cost < self._best:
            self._best, self._choices = cost, self._cut(self._reduced(choices))
            self._incumbent(self._choices)


def most_columns(options: SolveOptions) -> float:
    """Return the columns up to which a core is searched in the time that the options give.

    A relaxation of twice the columns takes two to three times as long, and the tree needs more of them.
    """
    seconds = math.inf if options.iteration_limit is not None else options.time_limit
    timed = CORE_COLUMNS_A_SECOND * math.sqrt(seconds)
    return min(MOST_CORE_COLUMNS, timed)
