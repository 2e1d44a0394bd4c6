"""Solvers of canonical problems behind one protocol, run in worker processes and judged by the checker."""

from formulations.solvers.explain import explain_infeasible
from formulations.solvers.ledger import SolverContradiction
from formulations.solvers.minimum_peak import MinimumPeak, minimum_peak
from formulations.solvers.registry import DEFAULT_SOLVER, SOLVERS, UnknownSolverError, find_solver
from formulations.solvers.run import SolveOptionsError, SolverInputError, solve, solve_in_process
from formulations.solvers.worker import SolverPool, WorkerStartError

__all__ = [
    "DEFAULT_SOLVER",
    "SOLVERS",
    "MinimumPeak",
    "SolveOptionsError",
    "SolverContradiction",
    "SolverInputError",
    "SolverPool",
    "UnknownSolverError",
    "WorkerStartError",
    "explain_infeasible",
    "find_solver",
    "minimum_peak",
    "solve",
    "solve_in_process",
]
