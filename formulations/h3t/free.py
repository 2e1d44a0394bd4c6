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
from functools import reduce

import numpy as np

from formulations.h3t.operations import ALL_ON, SETS
from formulations.h3t.problem import H3tStep, Outcome, simulate_sequences
from formulations.h3t.program import memory_floor
from formulations.h3t.sampling import H3tFound, fastest_of
from formulations.problem.solution import Claim, SolveOptions, Status, higher_bound
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.processes.worker import Listener, SolverPool
from formulations.solvers.protocol.registry import SolverSpec

__all__ = ["FreeResult", "descend", "solve_free"]

_DESCENT_SHARE = 0.4
"""Of the time limit."""

_LEAST_SECONDS = 0.1


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
    message
        What the solvers said.
    """

    status: Status
    sequence: tuple[int, ...] | None
    outcome: Outcome | None
    bound: int | None
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
        return FreeResult(Status.INFEASIBLE, None, None, None, f"{floor} bytes are there whatever the switches")
    best = fastest_of(step, (*starts, (int(ALL_ON),) * len(step.layers)))
    if best is not None:
        best = descend(step, best, time.monotonic() + _DESCENT_SHARE * chosen.time_limit)
    cutoff = _slowest(step) if best is None else best.outcome.cost - 1
    status, message = Status.FEASIBLE, ""
    with ExitStack() as stack:
        workers = pool if pool is not None else stack.enter_context(SolverPool())
        found, claim = _ask(workers, "solve", step, cutoff, chosen, deadline)
        best, bound, message = _fastest(step, found, best), claim.bound, claim.message
        if best is not None:
            cutoff = best.outcome.cost - 1
        if bound is not None and bound > cutoff:
            found, second = _ask(workers, "confirm", step, cutoff, chosen, deadline)
            if best is None and not found:
                status = Status.INFEASIBLE if second.proved_infeasible else Status.INFEASIBLE_UNCONFIRMED
                return FreeResult(status, None, None, None, f"{message}; {second.message}")
            if best is not None and second.proved_infeasible:
                status = Status.OPTIMAL
            best = _fastest(step, found, best)
    if best is None:
        return FreeResult(Status.NO_SOLUTION, None, None, bound, message)
    if bound is not None and bound > best.outcome.cost:
        bound = None  # a plan that the simulator accepts refutes what HiGHS claimed
    return FreeResult(status, best.sequence, best.outcome, bound, message)


def _fastest(step: H3tStep, found: list[tuple[int, ...]], known: H3tFound | None) -> H3tFound | None:
    return fastest_of(step, [*found, *([] if known is None else [known.sequence])])


def _ask(
    workers: SolverPool, function: str, step: H3tStep, cutoff: int, options: SolveOptions, deadline: float
) -> tuple[list[tuple[int, ...]], Claim]:
    """Sequences that a worker found, and its claim with the best bound on the way."""
    spec = SolverSpec(
        f"h3t_free_{function}", f"formulations.h3t.free_worker:{function}", {"step": step, "cutoff": cutoff}
    )
    limits = replace(options, time_limit=max(_LEAST_SECONDS, deadline - time.monotonic()))
    found: list[tuple[int, ...]] = []
    bounds: list[int | None] = []
    listener = Listener(lambda progress: bounds.append(progress.bound), found.extend)
    ended = workers.run(spec, StrategyProblem("h3t", (), (), (), 0), limits, listener)
    claim = ended.claim or Claim(None, None, message=ended.message)
    found += [] if claim.choices is None else [claim.choices]
    return found, replace(claim, bound=reduce(higher_bound, bounds, claim.bound))


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
