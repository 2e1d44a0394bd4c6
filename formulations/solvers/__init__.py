"""Solvers of canonical problems behind one protocol, run in worker processes and judged by the checker."""

from formulations.solvers.ledger import SolverContradiction
from formulations.solvers.registry import SOLVERS, UnknownSolverError, find_solver
from formulations.solvers.run import SolveOptionsError, SolverInputError, solve, solve_in_process
from formulations.solvers.worker import SolverPool, WorkerStartError

__all__ = [
    "SOLVERS",
    "SolveOptionsError",
    "SolverContradiction",
    "SolverInputError",
    "SolverPool",
    "UnknownSolverError",
    "WorkerStartError",
    "find_solver",
    "solve",
    "solve_in_process",
]
