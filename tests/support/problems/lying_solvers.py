"""Built-in solvers whose library returns wrong results: ``support.problems.lying_solvers:SOLVER_LIE``.

The library is changed in the worker's process before the solver begins. Each lie is a result that a defect of the
library could cause: a bound that is too high, an optimum that is cut off, false infeasibility, too much
memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from formulations.solvers import SOLVERS
from formulations.solvers.protocol.registry import SolverSpec
from formulations.solvers.protocol.solver import Solver

LIES = ("bound", "cut_off", "infeasible", "over_the_limit")
OF_HIGHS = ("blocks", "branch_and_bound", "guessed_cores", "highs", "large_neighbourhood", "price_and_branch")
OF_CPSAT = ("cpsat",)
_FAR = 1e4
_TRUE = dict(SOLVERS)
"""The registry before any test changes it."""


class _Changed:
    """Another object with some attributes replaced."""

    def __init__(self, original: Any, **changed: Any) -> None:
        self._original, self._changed = original, changed

    def __getattr__(self, name: str) -> Any:
        return self._changed[name] if name in self._changed else getattr(self._original, name)


def _lying_highs(lie: str) -> None:
    import highspy

    class Lying(highspy.Highs):
        """HiGHS, but for one thing."""

    original = highspy.Highs

    def info(self: Any) -> Any:
        told = original.getInfo(self)
        high = told.objective_function_value + _FAR
        return _Changed(told, mip_dual_bound=high, objective_function_value=high)

    def solution(self: Any) -> Any:
        told = original.getSolution(self)
        values = np.array(told.col_value)
        if lie == "bound":  # duals that are none
            return _Changed(told, row_dual=1.5 * np.array(told.row_dual) + 1.0)
        return _Changed(told, col_value=np.roll(values, 1), col_dual=told.col_dual, row_dual=told.row_dual)

    def pass_model(self: Any, model: Any) -> Any:
        upper = np.array(model.col_upper_)
        upper[::3] = 0.0
        model.col_upper_ = upper
        return original.passModel(self, model)

    if lie == "bound":
        Lying.getInfo, Lying.getSolution = info, solution
    elif lie == "cut_off":
        Lying.passModel = pass_model
    elif lie == "infeasible":
        Lying.getModelStatus = lambda self: highspy.HighsModelStatus.kInfeasible
        Lying.getDualRay = lambda self: (highspy.HighsStatus.kOk, True, np.ones(original.getNumRow(self)))
    else:
        Lying.getSolution = solution
    highspy.Highs = Lying


def _lying_cpsat(lie: str) -> None:
    from ortools.sat.python import cp_model

    from formulations.solvers.exact import cpsat

    original = cp_model.CpSolver
    if lie == "bound":

        class Lying(original):
            """CP-SAT with bounds that are too high."""

            @property
            def best_objective_bound(self) -> float:
                return original.best_objective_bound.fget(self) + _FAR

        def rounded_objective(self: Any, choices: tuple[int, ...]) -> int:
            return 10**9

        cp_model.CpSolver, cpsat._Search.rounded_objective = Lying, rounded_objective
    elif lie == "cut_off":

        class Cutting(original):
            """CP-SAT that leaves out what takes the first strategy of the first node."""

            def solve(self, model: Any, *arguments: Any) -> Any:
                model.add(model.get_bool_var_from_proto_index(0) == 0)
                return original.solve(self, model, *arguments)

        cp_model.CpSolver = Cutting
    elif lie == "infeasible":

        class Refusing(original):
            """CP-SAT that finds nothing feasible."""

            def solve(self, model: Any, *arguments: Any) -> Any:
                return cp_model.INFEASIBLE

        cp_model.CpSolver = Refusing
    else:
        decode = cpsat._Search.decode
        cpsat._Search.decode = lambda self, values: tuple(0 for _ in decode(self, values))
        cpsat._Search.overloads = lambda self, choices: []


def _solve(solver: str, change: Callable[[str], None], lie: str, *arguments: Any, **keywords: Any) -> Any:
    solve: Solver = SolverSpec(solver, _TRUE[solver]).load()
    change(lie)
    return solve(*arguments, **keywords)


def targets(library: str, lie: str) -> dict[str, str]:
    """Return what to enter in the registry so that all solvers of a library lie."""
    solvers = OF_HIGHS if library == "highspy" else OF_CPSAT
    return {solver: f"{__name__}:{solver}_{lie}" for solver in solvers}


for _names, _change in ((OF_HIGHS, _lying_highs), (OF_CPSAT, _lying_cpsat)):
    for _name in _names:
        for _lie in LIES:
            globals()[f"{_name}_{_lie}"] = partial(_solve, _name, _change, _lie)
