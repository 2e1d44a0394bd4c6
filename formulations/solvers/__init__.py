"""Solvers of canonical problems behind one protocol, run in worker processes and judged by the checker."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from formulations.solvers.peaks.explain import explain_infeasible
    from formulations.solvers.peaks.minimum_peak import MinimumPeak, minimum_peak
    from formulations.solvers.processes.worker import SolverPool, WorkerStartError
    from formulations.solvers.protocol.registry import DEFAULT_SOLVER, SOLVERS, UnknownSolverError, find_solver
    from formulations.solvers.running.ledger import SolverContradiction
    from formulations.solvers.running.run import SolveOptionsError, SolverInputError, solve, solve_in_process

_HOMES = {
    "DEFAULT_SOLVER": "protocol.registry",
    "SOLVERS": "protocol.registry",
    "MinimumPeak": "peaks.minimum_peak",
    "SolveOptionsError": "running.run",
    "SolverContradiction": "running.ledger",
    "SolverInputError": "running.run",
    "SolverPool": "processes.worker",
    "UnknownSolverError": "protocol.registry",
    "WorkerStartError": "processes.worker",
    "explain_infeasible": "peaks.explain",
    "find_solver": "protocol.registry",
    "minimum_peak": "peaks.minimum_peak",
    "solve": "running.run",
    "solve_in_process": "running.run",
}

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


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
