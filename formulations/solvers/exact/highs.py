"""HiGHS on the linear model: LP with lazily added usage rows, then branch and cut until the replay is clean.

Only the rows that a replay finds violated are added, a spread dozen a round: of thousands of times a
few dozen ever matter. An integer solution that violates a row already present (HiGHS works to a tolerance) is cut off
by a cover cut, which is exact. What HiGHS reports as a bound is claimed; the exact bound is that of the duals of its
relaxation, evaluated in integers.
"""

from __future__ import annotations

import time

import numpy as np

from formulations.encodings.flat import flatten
from formulations.encodings.linear_model import LinearModel, build_linear_model
from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.exact.dual_evaluation import DualEvaluation
from formulations.solvers.exact.highs_session import (
    CostScale,
    HighsSession,
    Outcome,
    Values,
    margin,
)
from formulations.solvers.exact.lazy_rows import LazyRows
from formulations.solvers.prices.dual_bound import exact_bound
from formulations.solvers.protocol.exchange import EXCHANGE
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress

_COST_FIXING = True
"""Technique: columns fixed by reduced cost at the end of the relaxation."""


def solve(problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent) -> Claim:
    """Solve exactly, or to ``options.relative_gap`` where that is positive.

    ``options.initial_choices`` starts the search and, where feasible, fixes columns whose reduced
    cost shows that they cannot be part of a better assignment.
    """
    return _Search(problem, options, report, incumbent).run()


class _Search:
    """State of one solve."""

    def __init__(
        self, problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent
    ) -> None:
        self.started = time.monotonic()
        self.deadline = self.started + options.time_limit
        self.options, self.report, self.incumbent = options, report, incumbent
        self.problem = problem
        self.model: LinearModel = build_linear_model(problem)
        self.best: tuple[int, tuple[int, ...]] | None = None
        self.bound = self.model.constant << self.model.cost_shift
        """The largest bound that HiGHS claims."""
        self.exact: int | None = None
        """The bound of the relaxation's duals in exact integers."""
        self.excluded_from: int | None = None
        """Assignments that cost at least this much may have been excluded by fixed columns."""
        self.rounds = 0
        self.prepare()

    def prepare(self) -> None:
        """Make a session without the columns that alone cost more than the incumbent."""
        hopeless = np.zeros(self.model.columns, dtype=np.bool_)
        if self.best is not None:
            hopeless = self.model.cost > self.excess_of_best()
            self.excluded_from = self.best[0]
        cost = np.where(hopeless, 0, self.model.cost)
        self.scale = CostScale.of(cost)
        scaled = self.scale.apply(cost)
        self.session = HighsSession(self.model, scaled, self.options.seed)
        self.session.fix_to_zero(np.flatnonzero(hopeless))
        self.margin = margin(scaled, len(self.model.group_start) - 1)

    def run(self) -> Claim:
        self.report_progress()
        if self.options.initial_choices is not None:
            self.offer(self.options.initial_choices)
            self.prepare()
        rows = LazyRows(self.session)
        rows.add_all_if_few()
        if self.relax(rows):
            return self.exhausted("LP relaxation infeasible")
        return self.branch(rows)

    def excess_of_best(self) -> int:
        """Cost of the incumbent beyond the constant, in units of the model, rounded up."""
        if self.best is None:
            raise ValueError("there is no incumbent")
        return (self.best[0] >> self.model.cost_shift) + 1 - self.model.constant

    def relax(self, rows: LazyRows) -> bool:
        """LP rounds; True if the relaxation has no solution."""
        limits = [float(t.limit) if t.limit is not None else None for t in self.model.usage]
        outcome = self.session.run(self.deadline)
        while True:
            self.rounds += 1
            if outcome.infeasible:
                return True
            self.raise_bound(outcome.bound)
            self.import_incumbent()
            if outcome.values is None or not outcome.finished or time.monotonic() > self.deadline:
                break
            if not rows.add_violated(outcome.values, limits):
                self.evaluate_duals(outcome)
                if _COST_FIXING:
                    self.fix_by_reduced_cost(outcome.values, outcome.reduced_cost, outcome.bound)
                break
            outcome = self.session.run(self.deadline)
        return False

    def evaluate_duals(self, outcome: Outcome) -> None:
        """Raise the exact bound by the duals of the last relaxation."""
        flat = flatten(self.problem)
        if flat.contradiction or outcome.row_dual is None:
            return
        duals = DualEvaluation(self.model, flat)
        found = duals.prices_and_messages(outcome.row_dual, self.session.added_rows, self.scale)
        bound = exact_bound(self.problem, flat, *found)
        if self.exact is None or bound > self.exact:
            self.exact = bound
            self.report_progress()

    def fix_by_reduced_cost(self, values: Values, reduced_cost: Values | None, bound: float) -> None:
        """Fix columns that would cost at least as much as the incumbent (they stay possible in it)."""
        if self.best is None or reduced_cost is None:
            return
        allowance = self.excess_of_best() / self.scale.divisor / 2.0**self.scale.exponent - bound + self.margin
        hopeless = (reduced_cost > allowance) & (values < 0.5)
        chosen = self.model.column_values(self.best[1])
        if chosen is not None:
            hopeless &= chosen == 0.0
        self.session.fix_to_zero(np.flatnonzero(hopeless))
        self.excluded_from = self.best[0]

    def branch(self, rows: LazyRows) -> Claim:
        """Branch and cut, adding rows until the optimum of the rows present fits."""
        exact = 0.9 * 2.0**-self.scale.exponent
        units = abs(self.bound) / 2.0**self.model.cost_shift / self.scale.divisor
        wanted = self.options.relative_gap * units * 2.0**-self.scale.exponent
        self.session.make_integer(max(exact, wanted))
        self.session.subscribe(lambda values: self.offer(self.model.choices(values)), self.raise_bound)
        self.session.ask_for_solutions(self.column_values_of_others)
        while time.monotonic() < self.deadline:
            self.import_incumbent()
            if self.meets_exact_bound():
                return self.claim("the incumbent meets an exact bound")
            if self.best is not None:
                start = self.model.column_values(self.best[1])
                if start is not None:
                    self.session.start_from(start)
            outcome = self.session.run(self.deadline)
            self.rounds += 1
            if outcome.infeasible:
                return self.exhausted(outcome.message)
            self.raise_bound(outcome.bound)
            if outcome.values is None:
                return self.claim(outcome.message)
            choices = self.model.choices(outcome.values)
            local = self.model.local_choice(choices)
            self.offer(choices)
            if local is None or not rows.add_for_choice(local):
                return self.claim(outcome.message, complete=outcome.finished)
        return self.claim("time limit")

    def import_incumbent(self) -> None:
        """Take over what another solver found meanwhile, if it is better."""
        choices = EXCHANGE.take(self.problem)
        if choices is not None:
            self.offer(choices)

    def meets_exact_bound(self) -> bool:
        """Whether it is proved, here or by another solver, that the incumbent is good enough."""
        bound = EXCHANGE.bound(self.problem, self.exact)
        return self.best is not None and bound is not None and self.options.accepts(self.best[0], bound)

    def column_values_of_others(self) -> Values | None:
        """Column values of a better assignment that another solver found, for HiGHS in the midst of its search."""
        before = self.best
        self.import_incumbent()
        if self.best is None or self.best is before:
            return None
        return self.model.column_values(self.best[1])

    def offer(self, choices: tuple[int, ...]) -> None:
        """Keep and report an assignment if it fits and is better."""
        local = self.model.local_choice(choices)
        if local is None or any(
            table.limit is not None and (table.profile(local) > table.limit).any() for table in self.model.usage
        ):
            return
        objective = self.model.objective(choices)
        if self.best is None or objective < self.best[0]:
            self.best = (objective, choices)
            self.incumbent(choices)
            self.report_progress()

    def raise_bound(self, scaled: float) -> None:
        """Turn a bound of HiGHS into one on the integer problem and keep it if it is better."""
        if not np.isfinite(scaled):
            return
        units = self.model.constant + self.scale.round_up(scaled - self.margin)
        bound = units << self.model.cost_shift
        if self.excluded_from is not None:
            bound = min(bound, self.excluded_from)
        if bound > self.bound:
            self.bound = bound
            self.report_progress()

    def report_progress(self) -> None:
        objective = self.best[0] if self.best else None
        seconds = time.monotonic() - self.started
        self.report(Progress(seconds, objective, self.exact, "highs", claimed=self.bound))

    def exhausted(self, message: str) -> Claim:
        """Nothing is left: no assignment at all, or none better than what fixed columns excluded."""
        if self.excluded_from is None:
            choices = self.best[1] if self.best else None
            return Claim(choices, None, proved_infeasible=True, message=message, iterations=self.rounds)
        self.bound = self.excluded_from
        return self.claim(message, complete=True)

    def claim(self, message: str, *, complete: bool = False) -> Claim:
        """Return what was found; a search that is complete claims that the best assignment is optimal."""
        choices = self.best[1] if self.best else None
        claimed = self.bound
        if complete and self.best is not None and self.options.relative_gap == 0.0 and self.model.cost_shift == 0:
            claimed = self.best[0]
        return Claim(choices, self.exact, message=message, iterations=self.rounds, claimed=claimed, complete=complete)
