"""HiGHS on integer programs: scaled rows, checked solutions, safe bounds.

Rows are divided by their greatest common divisor and by a power of two, so that the tolerances of HiGHS
mean nearly the same in all of them. In rows of the form ``positive terms <= limit`` terms that are tiny beside
the limit are left out (HiGHS's presolve cuts off optima whose tiny coefficients matter), which relaxes
them. So every solution is checked against the rows in exact integers, and where such a row is broken its
cover is cut off and the search goes on.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formulations.encodings.integer_program import IntegerProgram
from formulations.encodings.usage_rows import LARGEST_COEFFICIENT, LEAST_COEFFICIENT
from formulations.solvers.exact.highs_session import CostScale, highs_options, margin

Values = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class ProgramOutcome:
    """How a program was left.

    Parameters
    ----------
    values
        The best solution, exact where columns are integer, or None.
    bound
        No solution costs less; None where nothing is known.
    infeasible
        There is no solution.
    finished
        The search ended by itself: ``values`` is optimal but for ``bound``.
    message
        The status that HiGHS ended with.
    """

    values: Values | None
    bound: int | None
    infeasible: bool
    finished: bool
    message: str


def solve_program(
    program: IntegerProgram,
    deadline: float,
    seed: int,
    on_values: Callable[[Values], None],
    on_bound: Callable[[int], None],
    cutoff: int | None = None,
    *,
    sub_mips: bool = True,
) -> ProgramOutcome:
    """Solve to optimality.

    Parameters
    ----------
    program
        What to solve.
    deadline
        ``time.monotonic()`` at which to stop.
    seed
        Seed of HiGHS.
    on_values, on_bound
        Called with improving solutions, not yet checked, and with bounds.
    cutoff
        Solutions that cost more are of no interest, or None; the bound is at most one above it.
    sub_mips
        Whether HiGHS looks for solutions by solving smaller programs (RINS, RENS).
    """
    import highspy

    session = _Session(highspy, program, seed, cutoff, sub_mips=sub_mips)
    session.subscribe(on_values, on_bound)
    outcome = session.run(deadline)
    while outcome.values is not None and outcome.finished:
        broken = program.broken_rows(outcome.values)
        if not broken or not session.cut_off(broken, outcome.values):
            break
        outcome = session.run(deadline)
    return outcome


class _Session:
    def __init__(
        self,
        library: Any,
        program: IntegerProgram,
        seed: int,
        cutoff: int | None,
        *,
        sub_mips: bool,
    ) -> None:
        self.library, self.program = library, program
        self.scale = CostScale.of(program.cost)
        scaled_cost = self.scale.apply(program.cost)
        self.margin = margin(scaled_cost, program.columns)
        self.highs = library.Highs()
        own = {
            "mip_abs_gap": 0.9 * 2.0**-self.scale.exponent,
            "mip_heuristic_run_rins": sub_mips,
            "mip_heuristic_run_rens": sub_mips,
        }
        for option, value in (highs_options(seed) | own).items():
            self.highs.setOptionValue(option, value)
        self.cutoff = cutoff
        if cutoff is not None:
            self.highs.setOptionValue(
                "objective_bound",
                float(math.ldexp(cutoff / self.scale.divisor, -self.scale.exponent)) + 0.5 * 2.0**-self.scale.exponent,
            )
        self.highs.passModel(self._arrays(scaled_cost))

    def _arrays(self, scaled_cost: Values) -> Any:
        program = self.program
        starts, columns, values, lower, upper = [0], [], [], [], []
        for index in range(program.rows):
            row_columns, coefficients, low, high = _scaled_row(program, index)
            columns.append(row_columns)
            values.append(coefficients)
            starts.append(starts[-1] + len(row_columns))
            lower.append(low)
            upper.append(high)
        lp = self.library.HighsLp()
        lp.num_col_, lp.num_row_ = program.columns, program.rows
        lp.col_cost_ = scaled_cost
        lp.col_lower_, lp.col_upper_ = program.lower.astype(np.float64), program.upper.astype(np.float64)
        lp.row_lower_, lp.row_upper_ = np.array(lower), np.array(upper)
        lp.a_matrix_.format_ = self.library.MatrixFormat.kRowwise
        lp.a_matrix_.start_ = np.array(starts, dtype=np.int32)
        lp.a_matrix_.index_ = np.concatenate(columns).astype(np.int32)
        lp.a_matrix_.value_ = np.concatenate(values)
        kinds = self.library.HighsVarType
        lp.integrality_ = [kinds.kInteger if flag else kinds.kContinuous for flag in program.is_integer]
        return lp

    def subscribe(self, on_values: Callable[[Values], None], on_bound: Callable[[int], None]) -> None:
        """Pass solutions and bounds on as they come."""
        self.highs.cbMipImprovingSolution.subscribe(lambda event: on_values(np.array(event.data_out.mip_solution)))

        def forward_bound(event: Any) -> None:
            bound = self._bound(float(event.data_out.mip_dual_bound))
            if bound is not None:
                on_bound(bound)

        self.highs.cbMipLogging.subscribe(forward_bound)

    def _bound(self, scaled: float) -> int | None:
        if not math.isfinite(scaled):
            return None
        bound = self.scale.round_up(scaled - self.margin)
        return bound if self.cutoff is None else min(bound, self.cutoff + 1)

    def cut_off(self, rows: list[int], values: Values) -> bool:
        """Add a cover cut for every broken row that is a knapsack of binaries; whether there was one."""
        found = False
        for index in rows:
            columns, _ = self.program.row(index)
            if _is_knapsack(self.program, index):
                chosen = columns[values[columns] > 0.5].astype(np.int32)
                self.highs.addRow(-math.inf, float(len(chosen) - 1), len(chosen), chosen, np.ones(len(chosen)))
                found = True
        return found

    def run(self, deadline: float) -> ProgramOutcome:
        """Run until solved or until the deadline."""
        remaining = max(0.0, deadline - time.monotonic())
        self.highs.setOptionValue("time_limit", self.highs.getRunTime() + remaining)
        self.highs.run()
        status, kinds, info = self.highs.getModelStatus(), self.library.HighsModelStatus, self.highs.getInfo()
        found = info.primal_solution_status == self.library.SolutionStatus.kSolutionStatusFeasible
        exhausted = status == kinds.kInfeasible or (status == kinds.kObjectiveBound)
        infeasible = exhausted and self.cutoff is None
        bound = self.cutoff + 1 if exhausted and self.cutoff is not None else self._bound(float(info.mip_dual_bound))
        return ProgramOutcome(
            values=np.array(self.highs.getSolution().col_value) if found else None,
            bound=None if infeasible else bound,
            infeasible=infeasible,
            finished=status == kinds.kOptimal or exhausted,
            message=self.highs.modelStatusToString(status),
        )


def _is_knapsack(program: IntegerProgram, index: int) -> bool:
    columns, coefficients = program.row(index)
    return (
        program.row_lower[index] is None
        and bool((coefficients > 0).all())
        and bool((program.lower[columns] == 0).all() and (program.upper[columns] == 1).all())
    )


def _scaled_row(program: IntegerProgram, index: int) -> tuple[NDArray[np.int64], Values, float, float]:
    """Columns, coefficients and bounds of a row in units that suit HiGHS."""
    columns, coefficients = program.row(index)
    bounds = [b for b in (program.row_lower[index], program.row_upper[index]) if b is not None]
    divisor = math.gcd(*coefficients.tolist(), *bounds) or 1
    largest = max(map(abs, [*coefficients.tolist(), *bounds]), default=0) // divisor
    exponent = max(0, largest.bit_length() - int(LARGEST_COEFFICIENT).bit_length() + 1)
    values = np.ldexp((coefficients // divisor).astype(np.float64), -exponent)
    if _is_knapsack(program, index):
        counts = values >= LEAST_COEFFICIENT
        columns, values = columns[counts], values[counts]
    low, high = program.row_lower[index], program.row_upper[index]
    return (
        columns,
        values,
        -math.inf if low is None else math.ldexp(low // divisor, -exponent),
        math.inf if high is None else math.ldexp(high // divisor, -exponent),
    )
