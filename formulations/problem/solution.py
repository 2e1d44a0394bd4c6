"""What a solve returns: a status, an incumbent AND a bound, and who found them in what time."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    """Outcome of a solve; the words of the contract, used everywhere."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    INFEASIBLE_UNCONFIRMED = "infeasible_unconfirmed"
    BOUND_ONLY = "bound_only"
    NO_SOLUTION = "no_solution"


@dataclass(frozen=True, slots=True)
class Progress:
    """One line of progress: seconds since the start, best incumbent, best bound, who found it.

    ``choices`` are a new incumbent's, checked, where :func:`formulations.solvers.solve` reports one.
    """

    seconds: float
    incumbent: int | None
    bound: int | None
    source: str
    choices: tuple[int, ...] | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class SolveOptions:
    """Limits and seeds of one solve.

    Parameters
    ----------
    time_limit
        Seconds of wall time for the solver itself; the worker is killed shortly after.
    seed
        Seed of everything random.
    relative_gap
        A solver may stop and say ``optimal`` only at this gap; 0 means a proof.
    memory_limit_bytes
        Resident-set limit of the worker process, or None.
    iteration_limit
        Iterations of an iterative solver, or None: makes it deterministic whatever the clock does.
    initial_choices
        A start, or None; solvers that cannot use one ignore it.
    workers
        Processes at work at once, for solvers that let others work for them; one per core if None. With 1
        the result is deterministic where the solve ends before its time limit.
    """

    time_limit: float = 60.0
    seed: int = 0
    relative_gap: float = 0.0
    memory_limit_bytes: int | None = None
    iteration_limit: int | None = None
    initial_choices: tuple[int, ...] | None = None
    workers: int | None = None

    def accepts(self, objective: int, bound: float) -> bool:
        """Whether an objective is as close to a bound as ``relative_gap`` asks for.

        As the gap of the contract is one of positive objectives, of others only a proof counts.

        Parameters
        ----------
        objective, bound
            In the problem's integer quantum; the bound may be a float, where a search only looks ahead.
        """
        return objective - bound <= self.relative_gap * max(0, objective)


@dataclass(frozen=True, slots=True)
class Claim:
    """What a solver itself says, before anything is checked.

    ``choices`` is one strategy index per node or None; ``bound`` is a lower bound on the optimum in
    the problem's integer quantum (rounded up is allowed: costs are integers) or None;
    ``proved_infeasible`` says that the solver believes that no assignment exists; ``certified`` says besides that
    this follows in exact integers, by presolve or by a dual bound, as any claimed bound does: no tolerance of a
    solver is in the way, and no second one need confirm it.
    """

    choices: tuple[int, ...] | None
    bound: int | None
    proved_infeasible: bool = False
    message: str = ""
    iterations: int = 0
    certified: bool = False


@dataclass(frozen=True, slots=True)
class SolveResult:
    """A claim after the checker: objective recomputed in exact integers, status earned.

    ``gap`` is ``(objective - bound) / objective`` (0 when both are equal, None where one is
    missing). ``peak_usage`` is the largest usage over time per resource of the incumbent.
    """

    status: Status
    choices: tuple[int, ...] | None
    objective: int | None
    bound: int | None
    gap: float | None
    solver: str
    seconds: float
    cpu_seconds: float
    peak_rss_bytes: int
    peak_usage: tuple[int, ...]
    history: tuple[Progress, ...] = ()
    message: str = ""


def relative_gap(objective: int | None, bound: int | None) -> float | None:
    """Gap of the contract, ``(objective - bound) / objective``; None where it has no meaning."""
    if objective is None or bound is None:
        return None
    if objective == bound:
        return 0.0
    if objective <= 0:
        return None
    return (objective - bound) / objective
