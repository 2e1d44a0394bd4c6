"""CP-SAT on integer programs: whether one has a solution, in exact integers.

A second opinion of another kind than branch and cut. Continuous columns are taken as integers, so it is for
programs that have a solution with integers wherever they have one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from formulations.encodings.integer_program import IntegerProgram

_BEYOND_ANY_ROW = 1 << 62
"""Not tunable: above any row."""

_LEAST_SECONDS = 0.01
"""Not tunable: a solve that gets less has no time to begin."""


@dataclass(frozen=True, slots=True)
class Existence:
    """A solution, or a proof that there is none, or neither (the time was short)."""

    values: NDArray[np.float64] | None
    infeasible: bool
    message: str


def find_solution(program: IntegerProgram, seconds: float, seed: int, most_cost: int | None = None) -> Existence:
    """Look for any solution, of a cost of at most ``most_cost`` where that is given.

    Parameters
    ----------
    program
        Rows and bounds.
    seconds
        Time limit.
    seed
        Seed of CP-SAT, which runs in one thread.
    """
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    columns = [
        model.new_int_var(low, high, "")
        for low, high in zip(program.lower.tolist(), program.upper.tolist(), strict=True)
    ]
    for index in range(program.rows):
        members, coefficients = program.row(index)
        low, high = program.row_lower[index], program.row_upper[index]
        model.add_linear_constraint(
            cp_model.LinearExpr.weighted_sum([columns[c] for c in members.tolist()], coefficients.tolist()),
            -_BEYOND_ANY_ROW if low is None else low,
            _BEYOND_ANY_ROW if high is None else high,
        )
    if most_cost is not None:
        model.add_linear_constraint(
            cp_model.LinearExpr.weighted_sum(columns, program.cost.tolist()), -_BEYOND_ANY_ROW, most_cost
        )
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = seed % (1 << 31)
    solver.parameters.max_time_in_seconds = max(_LEAST_SECONDS, seconds)
    status = solver.solve(model)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    values = np.array([solver.value(column) for column in columns], dtype=np.float64) if found else None
    return Existence(values, status == cp_model.INFEASIBLE, f"CP-SAT: {solver.status_name(status)}")
