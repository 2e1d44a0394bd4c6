"""H3T with synchronization as a free switch: plans by descent, bounds by HiGHS on a relaxation, the simulator judges.

The descent begins with the best plan that is known and changes the switches of one layer at a time. HiGHS then looks
for anything cheaper (:mod:`formulations.h3t.program`); what the simulator finds too large is forbidden. Bounds are
claims of HiGHS; a plan is optimal where CP-SAT finds no cheaper solution of the program either. That nothing fits at
all is proven where the limit is below what is certainly there, in integers, or where CP-SAT finds no solution either.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np

from formulations.h3t.free_worker import step_as_text
from formulations.h3t.operations import ALL_ON, SETS
from formulations.h3t.problem import H3tStep, Outcome, simulate_sequences
from formulations.h3t.program import memory_floor
from formulations.h3t.sampling import H3tFound, fastest_of
from formulations.problem.solution import SolveOptions, Status
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.processes.worker import Listener, SolverPool
from formulations.solvers.protocol.registry import SolverSpec

__all__ = ["FreeResult", "descend", "solve_free"]

_DESCENT_SHARE = 0.4
"""Of the time limit."""

_LEAST_SECONDS = 0.1
_SOLVE, _CONFIRM = "solve", "confirm"


@dataclass(frozen=True, slots=True)
class FreeResult:
    """The best sequence found, over all 128 sets of switches, and a bound on all of them.

    Parameters
    ----------
    status
        Optimal where HiGHS and CP-SAT agree; infeasible where that is proven in one of two ways, unconfirmed where
        HiGHS alone claims it.
    sequence, outcome
        Sets of switches with their simulated cost and peak, or None where nothing was found.
    bound
        HiGHS claims that no sequence within the limit costs less; None where nothing is known, nothing fits, or a
        sequence that was found costs less.
    cpu_seconds, peak_rss_bytes
        Of the worker.
    message
        Its words.
    """

    status: Status
    sequence: tuple[int, ...] | None
    outcome: Outcome | None
    bound: int | None
    cpu_seconds: float
    peak_rss_bytes: int
    message: str


def solve_free(
    step: H3tStep,
    starts: Iterable[tuple[int, ...]] = (),
    options: SolveOptions | None = None,
    pool: SolverPool | None = None,
) -> FreeResult:
    """Find a fast sequence and bound all of them.

    Parameters
    ----------
    step
        Layers and limit.
    starts
        Sequences to begin with, all switches on being another; those that do not fit are left out.
    options
        Time limit and seed.
    pool
        Whose worker is used; a new one if None.

    Raises
    ------
    H3tError
        If a start has not one set of switches per layer.
    """
    chosen = options or SolveOptions()
    deadline = time.monotonic() + chosen.time_limit
    floor = memory_floor(step)
    if floor > step.memory_limit:
        message = f"{floor} bytes are there whatever the switches"
        return FreeResult(Status.INFEASIBLE, None, None, None, 0.0, 0, message)
    best = fastest_of(step, (*starts, (int(ALL_ON),) * len(step.layers)))
    if best is not None:
        best = descend(step, best, time.monotonic() + _DESCENT_SHARE * chosen.time_limit)
    cutoff = _slowest(step) if best is None else best.outcome.cost - 1
    status = Status.FEASIBLE
    with ExitStack() as stack:
        workers = pool if pool is not None else stack.enter_context(SolverPool())
        answer = _ask(workers, _SOLVE, step, cutoff, chosen, deadline)
        best, bound = _fastest(step, answer.found, best), answer.bound
        if best is None and bound is not None and bound > cutoff:
            second = _ask(workers, _CONFIRM, step, cutoff, chosen, deadline)
            if not second.found:
                return _nothing_fits(answer, second)
            best = _fastest(step, second.found, None)
        elif best is not None and bound == best.outcome.cost:
            second = _ask(workers, _CONFIRM, step, best.outcome.cost - 1, chosen, deadline, costs_at_most=True)
            status = Status.OPTIMAL if second.infeasible else status
            best = _fastest(step, second.found, best)
    if best is None:
        return FreeResult(
            Status.NO_SOLUTION, None, None, bound, answer.cpu_seconds, answer.peak_rss_bytes, answer.message
        )
    if bound is not None and bound > best.outcome.cost:
        bound = None  # a plan that the simulator accepts refutes what HiGHS claimed
    return FreeResult(
        status, best.sequence, best.outcome, bound, answer.cpu_seconds, answer.peak_rss_bytes, answer.message
    )


def _fastest(step: H3tStep, found: list[tuple[int, ...]], known: H3tFound | None) -> H3tFound | None:
    return fastest_of(step, [*found, *([] if known is None else [known.sequence])])


@dataclass(frozen=True, slots=True)
class _Answer:
    """What a worker said."""

    found: list[tuple[int, ...]]
    bound: int | None
    infeasible: bool
    cpu_seconds: float
    peak_rss_bytes: int
    message: str


def _ask(
    workers: SolverPool,
    function: str,
    step: H3tStep,
    cutoff: int,
    options: SolveOptions,
    deadline: float,
    *,
    costs_at_most: bool = False,
) -> _Answer:
    keywords: dict[str, str | int] = {"step": step_as_text(step), "cutoff": cutoff}
    if costs_at_most:
        keywords["costs_at_most"] = True
    spec = SolverSpec(f"h3t_free_{function}", f"formulations.h3t.free_worker:{function}", keywords)
    limits = replace(options, time_limit=max(_LEAST_SECONDS, deadline - time.monotonic()))
    found: list[tuple[int, ...]] = []
    bounds: list[int] = []
    listener = Listener(
        lambda progress: bounds.append(progress.bound) if progress.bound is not None else None, found.extend
    )
    ended = workers.run(spec, StrategyProblem("h3t", (), (), (), 0), limits, listener)
    claim = ended.claim
    if claim is None:
        return _Answer(found, max(bounds, default=None), False, ended.cpu_seconds, ended.peak_rss_bytes, ended.message)
    found += [] if claim.choices is None else [claim.choices]
    bounds += [] if claim.bound is None else [claim.bound]
    bound = max(bounds, default=None)
    return _Answer(found, bound, claim.proved_infeasible, ended.cpu_seconds, ended.peak_rss_bytes, claim.message)


def _nothing_fits(answer: _Answer, second: _Answer) -> FreeResult:
    """HiGHS excludes everything: so it is, where CP-SAT does too."""
    return FreeResult(
        Status.INFEASIBLE if second.infeasible else Status.INFEASIBLE_UNCONFIRMED,
        None,
        None,
        None,
        answer.cpu_seconds + second.cpu_seconds,
        max(answer.peak_rss_bytes, second.peak_rss_bytes),
        f"{answer.message}; {second.message}",
    )


def descend(step: H3tStep, start: H3tFound, deadline: float) -> H3tFound:
    """Change the switches of one layer at a time as long as that is faster and fits; the best change first."""
    best = start
    rows = np.arange(SETS * len(step.layers))
    while time.monotonic() < deadline:
        sequences = np.repeat(np.array([best.sequence], dtype=np.int64), len(rows), axis=0)
        sequences[rows, rows // SETS] = rows % SETS
        found = simulate_sequences(step, sequences)
        found[found[:, 1] > step.memory_limit, 0] = np.iinfo(np.int64).max
        row = int(found[:, 0].argmin())
        if found[row, 0] >= best.outcome.cost:
            break
        best = H3tFound(tuple(sequences[row].tolist()), Outcome(*found[row].tolist()))
    return best


def _slowest(step: H3tStep) -> int:
    """More than any plan takes: everything happens, one after the other."""
    durations = step.durations()
    reloads = sum(layer.shard_copy for layer in step.layers)
    return int(durations[durations > 0].sum()) + reloads + step.final_cost
