r"""The linear model written out in Pyomo: to read, to export, and to hand to any solver a user owns.

The same columns, rows and exact bounds as the arrays of :mod:`formulations.encodings.linear_model`, which says
where they come from; here every family of constraints has a name:

- ``one_strategy[i]``: node ``i`` takes exactly one strategy, :math:`\sum_s x_{i,s} = 1`;
- ``marginal[f, k, s]``: the entries of factor ``f`` agree with its ``k``-th node,
  :math:`\sum_{e_k = s} e = x_{scope_k(f), s}`;
- ``usage[r, t]``: resource ``r`` suffices at time ``t`` (share of what is left after the least usage);
- ``total_cost``: the objective, in the problem's quantum.

Building takes seconds where the arrays take milliseconds: for large problems use ``highs``.
"""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import numpy as np

from formulations.encodings.linear_model import LinearModel, build_linear_model
from formulations.encodings.pyomo_program import write_program
from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.exact.highs_session import margin
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress


class PyomoSolverError(ValueError):
    """A solver that Pyomo does not know or that is not installed."""


_COMPLETE = ("convergenceCriteriaSatisfied", "optimal")
"""Not tunable: how Pyomo's two generations of solvers say that a search ended with an optimum."""


def solve(
    problem: StrategyProblem,
    options: SolveOptions,
    report: ReportProgress,
    incumbent: ReportIncumbent,
    solver_name: str = "highs",
) -> Claim:
    """Solve the Pyomo model with one of Pyomo's solvers.

    Parameters
    ----------
    problem, options, report, incumbent
        As every solver takes them.
    solver_name
        A name of ``pyomo.contrib.solver``, else of Pyomo's older factory.

    Raises
    ------
    PyomoSolverError
        If the solver is unknown or not installed.
    """
    started = time.monotonic()
    linear = build_linear_model(problem)
    model = build_pyomo_model(linear)
    solver, modern = _find(solver_name)
    run = _run_modern if modern else _run_legacy
    rounds = 0
    while (remaining := options.time_limit - (time.monotonic() - started)) > 0:
        rounds += 1
        bound, infeasible, message = run(solver, model, remaining, options.relative_gap)
        if infeasible:
            return Claim(None, None, proved_infeasible=True, message=message, iterations=rounds)
        claimed = _whole_bound(linear, bound)
        choices = _choices(model, linear)
        if choices is not None and _cut_off(model, linear, choices):
            continue
        if choices is not None:
            incumbent(choices)
        objective = linear.objective(choices) if choices is not None else None
        report(Progress(time.monotonic() - started, objective, None, "pyomo", claimed=claimed))
        complete = choices is not None and message in _COMPLETE
        return Claim(choices, None, message=message, iterations=rounds, claimed=claimed, complete=complete)
    return Claim(None, None, message="time limit", iterations=rounds)


def build_pyomo_model(linear: LinearModel) -> Any:
    """Write a linear model as a ``pyomo.environ.ConcreteModel``; see the module docstring for its parts."""
    import pyomo.environ as pyo

    nodes = linear.problem.nodes
    model = pyo.ConcreteModel(name=linear.problem.name)
    model.x = pyo.Var([(i, s) for i, node in enumerate(nodes) for s in range(node.size)], domain=pyo.Binary)
    entries = [(f, k) for f, factor in enumerate(linear.factors) for k in range(len(factor.entries))]
    model.e = pyo.Var(entries, domain=pyo.NonNegativeReals, bounds=(0, 1))
    columns = [*model.x.values(), *model.e.values()]
    # Bounds and not fix(): some interfaces drop rows whose variables are all fixed, even false ones.
    for column in np.flatnonzero(~linear.allowed).tolist():
        columns[column].setub(0)

    @model.Constraint(range(len(nodes)))  # type: ignore[untyped-decorator]
    def one_strategy(model: Any, i: int) -> Any:
        return pyo.quicksum(model.x[i, s] for s in range(nodes[i].size)) == 1

    @model.Constraint(  # type: ignore[untyped-decorator]
        [
            (f, k, s)
            for f, factor in enumerate(linear.factors)
            for k, i in enumerate(factor.scope)
            for s in range(nodes[i].size)
        ]
    )
    def marginal(model: Any, f: int, k: int, s: int) -> Any:
        factor = linear.factors[f]
        matching = np.flatnonzero(factor.entries[:, k] == s).tolist()
        return pyo.quicksum(model.e[f, entry] for entry in matching) - model.x[factor.scope[k], s] == 0

    model.cuts = pyo.ConstraintList(doc="assignments that fit within a solver's tolerance, but not exactly")
    model.usage = pyo.Constraint(pyo.Any)
    for table in linear.usage:
        for t in table.maximal_times(linear.allowed).tolist():
            row = table.row(t, linear.allowed).scaled()
            for column in row.impossible.tolist():
                columns[column].setub(0)
            if row.upper < 0:
                model.usage[table.resource, t] = columns[0] <= row.upper
            if not len(row.columns):
                continue
            terms = zip(row.coefficients.tolist(), row.columns.tolist(), strict=True)
            model.usage[table.resource, t] = pyo.quicksum(c * columns[k] for c, k in terms) <= row.upper
    unit = 1 << linear.cost_shift
    costed = np.flatnonzero(linear.cost).tolist()
    model.total_cost = pyo.Objective(
        expr=linear.constant * unit + pyo.quicksum(int(linear.cost[k]) * unit * columns[k] for k in costed)
    )
    return model


def export_model(problem: StrategyProblem, path: str | Path) -> None:
    """Write the linear model to an ``.lp`` or ``.mps`` file, with the names of the Pyomo model.

    Raises
    ------
    ProblemError
        If the suffix is neither, or a usage row cannot be satisfied by any choice.
    """
    write_program(build_pyomo_model(build_linear_model(problem)), path)


def _find(name: str) -> tuple[Any, bool]:
    import pyomo.environ as pyo
    from pyomo.contrib.solver.common.factory import SolverFactory

    modern = name in set(SolverFactory)
    solver = SolverFactory(name) if modern else pyo.SolverFactory(name)
    if not solver.available(*([] if modern else [False])):
        raise PyomoSolverError(
            f"Pyomo has no working solver {name!r}: install it, or use pyomo:highs, which comes with this package"
        )
    return solver, modern


def _run_modern(solver: Any, model: Any, seconds: float, gap: float) -> tuple[float, bool, str]:
    from pyomo.contrib.solver.common.results import SolutionStatus, TerminationCondition

    results = solver.solve(
        model,
        time_limit=seconds,
        threads=1,
        rel_gap=gap,
        abs_gap=0.0,
        load_solutions=False,
        raise_exception_on_nonoptimal_result=False,
    )
    found = results.solution_status in (SolutionStatus.feasible, SolutionStatus.optimal)
    if found:
        results.solution_loader.load_vars()
    condition = results.termination_condition
    infeasible = not found and condition is TerminationCondition.provenInfeasible
    bound = results.objective_bound
    return -math.inf if bound is None else float(bound), infeasible, str(condition).rpartition(".")[2]


def _run_legacy(solver: Any, model: Any, seconds: float, gap: float) -> tuple[float, bool, str]:
    from pyomo.opt import TerminationCondition

    options = {"timelimit": seconds, "load_solutions": False}
    results = solver.solve(model, **options)
    condition = results.solver.termination_condition
    if condition == TerminationCondition.optimal or len(results.solution):
        model.solutions.load_from(results)
    infeasible = condition == TerminationCondition.infeasible
    bound = results.problem.lower_bound
    return -math.inf if bound is None else float(bound), infeasible, str(condition)


def _choices(model: Any, linear: LinearModel) -> tuple[int, ...] | None:
    values = [variable.value for variable in model.x.values()]
    if any(value is None and not variable.fixed for value, variable in zip(values, model.x.values(), strict=True)):
        return None
    padded = np.zeros(linear.columns)
    padded[: len(values)] = [value or 0.0 for value in values]
    return linear.choices(padded)


def _cut_off(model: Any, linear: LinearModel, choices: tuple[int, ...]) -> bool:
    """Add an exact cut for every limit that an assignment exceeds; False if it exceeds none."""
    columns = [*model.x.values(), *model.e.values()]
    local = linear.local_choice(choices)
    if local is None:
        model.cuts.add(sum(model.x[i, s] for i, s in enumerate(choices)) <= len(choices) - 1)
        return True
    found = False
    for table in linear.usage:
        profile = table.profile(local)
        time_ = int(np.argmax(profile)) if len(profile) else 0
        if table.limit is not None and len(profile) and profile[time_] > table.limit:
            cover = table.cover(time_, local).tolist()
            model.cuts.add(sum(columns[k] for k in cover) <= len(cover) - 1)
            found = True
    return found


def _whole_bound(linear: LinearModel, bound: float) -> int | None:
    """Round a solver's bound up to an integer after taking off what its tolerances may have added."""
    if not math.isfinite(bound):
        return None
    unit = 1 << linear.cost_shift
    costs = linear.cost.astype(np.float64) * unit
    constant = float(np.finfo(np.float64).eps) * abs(linear.constant * unit)
    return math.ceil(bound - margin(costs, len(linear.group_start) - 1) - constant)
