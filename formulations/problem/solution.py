"""Results of a solve: status, incumbent and bound, with their solver and time."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


class Status(StrEnum):
    """Outcome of a solve, by the names of the contest's contract."""

    OPTIMAL = "optimal"
    FEASIBLE = "feasible"
    INFEASIBLE = "infeasible"
    INFEASIBLE_UNCONFIRMED = "infeasible_unconfirmed"
    BOUND_ONLY = "bound_only"
    NO_SOLUTION = "no_solution"


class Proof(StrEnum):
    """How a bound, or infeasibility, is known.

    ``exact``: evaluated in integers (prices, messages, duals of linear programs, dynamic programming, a tree whose
    every bound is such an evaluation). ``agreed``: two solvers of different kinds, on different statements of the
    problem, both claim it. ``claimed``: one solver in floating point, one external library or a user's solver claims
    it.
    """

    EXACT = "exact"
    AGREED = "agreed"
    CLAIMED = "claimed"


@dataclass(frozen=True, slots=True)
class Progress:
    """One line of progress: seconds since the start, best incumbent, best bound, solver.

    ``bound`` follows in exact integers, ``claimed`` is what the source claims beyond it. ``choices`` are a new
    incumbent's, checked, where :func:`formulations.solvers.solve` reports one.
    """

    seconds: float
    incumbent: int | None
    bound: int | None
    source: str
    choices: tuple[int, ...] | None = field(default=None, repr=False, compare=False)
    claimed: int | None = None


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
        Largest gap at which a solver may stop with status ``optimal``; 0 requires a proof.
    memory_limit_bytes
        Resident-set limit of the worker process, or None.
    iteration_limit
        Iterations of an iterative solver, or None: makes it deterministic, independent of the clock.
    initial_choices
        A start, or None; solvers that cannot use one ignore it.
    workers
        Processes at work at once, for solvers that run others; one per core if None. With 1 the result is
        deterministic where the solve ends before its time limit.
    """

    time_limit: float = 60.0
    seed: int = 0
    relative_gap: float = 0.0
    memory_limit_bytes: int | None = None
    iteration_limit: int | None = None
    initial_choices: tuple[int, ...] | None = None
    workers: int | None = None

    def accepts(self, objective: int, bound: float) -> bool:
        """Whether an objective is within ``relative_gap`` of a bound.

        The gap of the contract is defined for positive objectives; others must equal the bound.

        Parameters
        ----------
        objective, bound
            In the problem's integer quantum; the bound may be a float, where a search only looks ahead.
        """
        return objective - bound <= self.relative_gap * max(0, objective)


@dataclass(frozen=True, slots=True)
class Claim:
    """Claim of a solver, before any check.

    ``choices`` is one strategy index per node or None; ``bound`` is a lower bound on the optimum in
    the problem's integer quantum (rounded up is allowed: costs are integers) or None, and follows in exact integers.
    ``claimed`` is a lower bound that depends on floating point or on an external library. ``complete`` says that the
    search ended because nothing is left to search, and not at a limit: it claims that its assignment is optimal, as
    far as its tolerances and roundings can tell. ``proved_infeasible`` claims that no assignment exists;
    ``certified`` adds that this follows in exact integers, so that no second solver need confirm it.
    What a solver that is not built in returns as exact counts as claimed.
    """

    choices: tuple[int, ...] | None
    bound: int | None
    proved_infeasible: bool = False
    message: str = ""
    iterations: int = 0
    certified: bool = False
    claimed: int | None = None
    complete: bool = False


@dataclass(frozen=True, slots=True)
class KnownBound:
    """A lower bound, how it is known, and the solver whose exact bound it is (empty where several agree)."""

    value: int
    proof: Proof
    by: str = ""


@dataclass(frozen=True, slots=True)
class SolveResult:
    """A claim after the check: objective recomputed in exact integers, status verified.

    ``proof`` is how ``bound`` is known (of an infeasible problem: how that is known), ``exact`` or ``agreed``; None
    where there is no bound. ``proved_by`` is the solver that an exact bound is of. ``claimed`` is the best bound that
    one solver of the kind ``claimed_by`` claims beyond it, or None. ``gap`` is ``(objective - bound) / objective`` (0
    when both are equal, None where one is missing). ``peak_usage`` is the largest usage over time per resource of the
    incumbent.
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
    proof: Proof | None = None
    claimed: int | None = None
    claimed_by: str = ""
    proved_by: str = ""

    @property
    def known_bound(self) -> KnownBound | None:
        """The bound with how it is known; None where there is none."""
        return None if self.bound is None or self.proof is None else KnownBound(self.bound, self.proof, self.proved_by)


def higher_bound(first: int | None, second: int | None) -> int | None:
    """Return the higher of two lower bounds, where None is no bound."""
    return max((bound for bound in (first, second) if bound is not None), default=None)


def relative_gap(objective: int | None, bound: int | None) -> float | None:
    """Gap of the contract, ``(objective - bound) / objective``; None where it has no meaning."""
    if objective is None or bound is None:
        return None
    if objective == bound:
        return 0.0
    if objective <= 0:
        return None
    return (objective - bound) / objective
