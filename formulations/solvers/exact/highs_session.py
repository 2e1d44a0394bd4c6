"""One HiGHS instance holding a linear model whose usage rows are added as they turn out to matter.

Costs are scaled so that HiGHS's absolute tolerances mean less than one unit of cost wherever doubles allow that. What
HiGHS calls a bound is a claim, also after it has been reduced by what tolerances and rounding can have added to it
(:func:`margin`); proofs come from its duals (:mod:`formulations.solvers.exact.dual_evaluation`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formulations.encodings.linear_model import LinearModel
from formulations.encodings.usage_rows import UsageRow
from formulations.problem.strategy_problem import IntArray
from formulations.solvers.exact.tunables import LARGEST_SCALED_COST

USUAL_TOLERANCE = 1e-6
"""Not tunable: HiGHS's own tolerance."""

WRONG_PRESOLVE_RULE = 1 << 12
"""Not tunable: the aggregator, as a bit in HiGHS's numbering of its presolve rules."""

_DUAL_SHARE = 0.1
"""Not tunable: HiGHS solves its LPs to a tenth of its tolerance on reduced costs."""

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class CostScale:
    """``cost = scaled * divisor * 2**exponent``: all costs are multiples of ``divisor``.

    Two different objectives differ by at least ``2**-exponent`` after scaling.
    """

    divisor: int
    exponent: int

    @classmethod
    def of(cls, cost: IntArray) -> CostScale:
        """Choose a scale that brings the largest cost to at most about a million."""
        divisor = max(1, int(np.gcd.reduce(cost))) if cost.size else 1
        largest = int(cost.max(initial=0)) // divisor
        return cls(divisor, max(0, largest.bit_length() - LARGEST_SCALED_COST.bit_length() + 1))

    def apply(self, cost: IntArray) -> Values:
        """Scale costs; exact, because only a power of two is divided away."""
        return np.ldexp((cost // self.divisor).astype(np.float64), -self.exponent)

    def round_up(self, scaled_bound: float) -> int:
        """Return the least achievable cost that is not below ``scaled_bound``."""
        return math.ceil(Fraction(scaled_bound) * (1 << self.exponent)) * self.divisor


def margin(scaled_cost: Values, groups: int) -> float:
    """How far tolerances and rounding let a bound of HiGHS exceed the true one: an estimate, no proof.

    A reduced cost may be negative by the dual tolerance in every group (exactly one column of each
    is chosen), a node is pruned within the feasibility tolerance of the incumbent, and a sum of
    ``groups`` doubles is off by ``groups`` roundings of its size.
    """
    size = groups * float(scaled_cost.max(initial=0.0))
    return USUAL_TOLERANCE * (1 + _DUAL_SHARE * groups) + float(np.finfo(np.float64).eps) * groups * size


@dataclass(frozen=True, slots=True)
class AddedRow:
    """A usage row of a session: its resource and time, and the usage that one unit of it stands for."""

    resource: int
    time: int
    unit: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run of HiGHS ended with, in scaled units; ``values`` is None where it has none.

    ``row_dual`` has the duals of an optimal linear program, or the dual ray of an infeasible one, where there are any:
    structural rows first, then those added, in their order.
    """

    values: Values | None
    reduced_cost: Values | None
    row_dual: Values | None
    bound: float
    infeasible: bool
    finished: bool
    message: str


def highs_options(seed: int) -> dict[str, Any]:
    """Return the options of every run: one thread, no gap, and nothing switched on that cuts off optima."""
    return {
        "output_flag": False,
        "threads": 1,
        "random_seed": seed % (1 << 31),
        "mip_feasibility_tolerance": USUAL_TOLERANCE,
        "primal_feasibility_tolerance": USUAL_TOLERANCE,
        "mip_rel_gap": 0.0,
        # Restarts of HiGHS 1.15.1 cut off optima (test_small_amounts_that_matter), and so does one rule of its
        # presolve: four of 1,750 random programs came out too dear, solved by presolve alone
        # (test_where_presolve_went_wrong).
        "mip_allow_restart": False,
        "presolve_rule_off": WRONG_PRESOLVE_RULE,
    }


class HighsSession:
    """A HiGHS instance over the columns of a linear model.

    Parameters
    ----------
    model
        The linear model.
    scaled_cost
        Objective per column.
    seed
        Seed of HiGHS.
    """

    def __init__(self, model: LinearModel, scaled_cost: Values, seed: int) -> None:
        import highspy

        self.model = model
        self.added_rows: list[AddedRow | None] = []
        """Usage rows after the structural ones; None for a cut that is none."""
        self._integer = False
        self._library = highspy
        self._highs = highspy.Highs()
        for option, value in highs_options(seed).items():
            self._highs.setOptionValue(option, value)
        self._highs.setOptionValue("dual_feasibility_tolerance", USUAL_TOLERANCE * _DUAL_SHARE)
        self._highs.passModel(self._arrays(scaled_cost))
        self._on_solution: Callable[[Values], None] | None = None
        self._on_bound: Callable[[float], None] | None = None
        self._ask: Callable[[], Values | None] | None = None

    def _arrays(self, scaled_cost: Values) -> Any:
        model = self.model
        lp = self._library.HighsLp()
        lp.num_col_ = model.columns
        lp.num_row_ = len(model.row_rhs)
        lp.col_cost_ = scaled_cost
        lp.col_lower_ = np.zeros(lp.num_col_)
        lp.col_upper_ = model.allowed.astype(np.float64)
        lp.row_lower_ = model.row_rhs
        lp.row_upper_ = model.row_rhs
        lp.a_matrix_.format_ = self._library.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = model.row_start.astype(np.int32)
        lp.a_matrix_.index_ = model.row_column.astype(np.int32)
        lp.a_matrix_.value_ = model.row_value
        return lp

    def add_usage_row(self, row: UsageRow) -> None:
        """Add a usage row, scaled."""
        scaled = row.scaled()
        self.fix_to_zero(scaled.impossible)
        self.added_rows.append(AddedRow(row.resource, row.time, scaled.unit * 2.0**row.shift))
        self._add_row(scaled.columns, scaled.coefficients, scaled.upper)

    def forbid_together(self, columns: IntArray) -> None:
        """Add the cover cut ``sum(z[columns]) <= len(columns) - 1``: exact whatever the amounts are."""
        self.added_rows.append(None)
        self._add_row(columns, np.ones(len(columns)), float(len(columns) - 1))

    def _add_row(self, columns: IntArray, values: Values, upper: float) -> None:
        self._highs.addRow(-self._library.kHighsInf, upper, len(columns), columns.astype(np.int32), values)

    def fix_to_zero(self, columns: IntArray) -> None:
        """Fix columns that cannot be part of a better solution."""
        if len(columns):
            zeros = np.zeros(len(columns))
            self._highs.changeColsBounds(len(columns), columns.astype(np.int32), zeros, zeros)

    def allow_only(self, columns: NDArray[np.bool_]) -> None:
        """Allow the flagged one-hot columns and fix all others of them to zero."""
        count = len(columns)
        upper = columns.astype(np.float64)
        self._highs.changeColsBounds(count, np.arange(count, dtype=np.int32), np.zeros(count), upper)

    def make_integer(self, absolute_gap: float) -> None:
        """Demand binary one-hot columns from now on, and stop at ``absolute_gap`` (scaled)."""
        ones = self.model.one_hot_columns
        kinds = np.full(ones, int(self._library.HighsVarType.kInteger), dtype=np.uint8)
        self._highs.changeColsIntegrality(ones, np.arange(ones, dtype=np.int32), kinds)
        self._highs.setOptionValue("mip_abs_gap", absolute_gap)
        self._integer = True

    def subscribe(self, on_solution: Callable[[Values], None], on_bound: Callable[[float], None]) -> None:
        """Call back with every improving solution and, now and then, with the bound (scaled)."""
        self._on_solution, self._on_bound = on_solution, on_bound
        self._highs.cbMipImprovingSolution.subscribe(self._solution_event)
        self._highs.cbMipLogging.subscribe(self._bound_event)

    def _solution_event(self, event: Any) -> None:
        if self._on_solution is not None:
            self._on_solution(np.array(event.data_out.mip_solution))

    def _bound_event(self, event: Any) -> None:
        bound = float(event.data_out.mip_dual_bound)
        if self._on_bound is not None and math.isfinite(bound):
            self._on_bound(bound)

    def ask_for_solutions(self, ask: Callable[[], Values | None]) -> None:
        """Ask now and then during branch and cut for a better solution than any so far."""
        self._ask = ask
        self._highs.cbMipUserSolution.subscribe(self._user_solution_event)

    def _user_solution_event(self, event: Any) -> None:
        values = None if self._ask is None else self._ask()
        if values is not None:
            event.data_in.setSolution(values)

    def start_from(self, values: Values) -> None:
        """Offer a starting solution to the next integer run."""
        solution = self._library.HighsSolution()
        solution.col_value = list(values)
        self._highs.setSolution(solution)

    def run(self, deadline: float) -> Outcome:
        """Run until solved or until ``time.monotonic()`` reaches ``deadline``."""
        # HiGHS compares the limit with the run time of all runs so far.
        remaining = max(0.0, deadline - time.monotonic())
        self._highs.setOptionValue("time_limit", self._highs.getRunTime() + remaining)
        self._highs.run()
        status = self._highs.getModelStatus()
        kinds = self._library.HighsModelStatus
        info = self._highs.getInfo()
        is_mip = self._integer
        found = info.primal_solution_status == self._library.SolutionStatus.kSolutionStatusFeasible
        optimal = status == kinds.kOptimal
        solution = self._highs.getSolution()
        bound = float(info.mip_dual_bound) if is_mip else float(info.objective_function_value)
        return Outcome(
            values=np.array(solution.col_value) if found else None,
            reduced_cost=np.array(solution.col_dual) if optimal and not is_mip else None,
            row_dual=None if is_mip else self._row_dual(optimal, status == kinds.kInfeasible, solution),
            bound=bound if is_mip or optimal else -math.inf,
            infeasible=status == kinds.kInfeasible,
            finished=optimal or status == kinds.kInfeasible,
            message=self._highs.modelStatusToString(status),
        )

    def _row_dual(self, optimal: bool, infeasible: bool, solution: Any) -> Values | None:
        if optimal:
            return np.array(solution.row_dual)
        if not infeasible:
            return None
        _, exists, ray = self._highs.getDualRay()
        return np.array(ray) if exists else None
