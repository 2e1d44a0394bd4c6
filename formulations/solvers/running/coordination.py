"""What a solver works with that runs other solvers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from formulations.solvers.processes.worker import SolverPool
from formulations.solvers.protocol.solver import AskOthers, ReportProgress


@dataclass(frozen=True, slots=True)
class CoordinatorContext:
    """Workers and callbacks of a solver that runs others; it works in the caller's process and thread.

    Parameters
    ----------
    workers
        Processes to run others in.
    report
        As for every solver.
    incumbent
        Takes every better assignment and the name of the solver that found it.
    spend
        Takes processor seconds, and the peak of resident bytes of all processes together.
    should_stop
        Called now and then; where it returns True, the solve ends as by Ctrl-C.
    from_others
        Called now and then for assignments that were found elsewhere.
    """

    workers: SolverPool
    report: ReportProgress
    incumbent: Callable[[tuple[int, ...], str], None]
    spend: Callable[[float, int], None]
    should_stop: Callable[[], bool] = lambda: False
    from_others: AskOthers = lambda: None
