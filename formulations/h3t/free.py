"""H3T with synchronization as a free switch: few layers by one CP-SAT model, many by descent and bounds.

Up to :data:`MODEL_LAYERS` layers CP-SAT decides the whole problem (:mod:`formulations.h3t.event_model`). For more, a
descent begins with the best plan that is known and changes the switches of one layer at a time, and HiGHS bounds all
plans by a relaxation (:mod:`formulations.h3t.program`). Its bounds are claims; a plan is optimal where CP-SAT finds no
cheaper solution of the program either. That nothing fits at all is proven where the limit is below what is certainly
there, in integers, or where CP-SAT finds no solution. Table ``free_restated`` of the paper's results compares both.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import numpy as np

from formulations.h3t.operations import ALL_ON, SETS
from formulations.h3t.problem import H3tStep, Outcome, simulate_sequences
from formulations.h3t.program import memory_floor
from formulations.h3t.sampling import H3tFound, fastest_of
from formulations.problem.solution import Claim, SolveOptions, Status, higher_bound
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.processes.worker import Listener, SolverPool
from formulations.solvers.protocol.registry import SolverSpec

__all__ = ["MODEL_LAYERS", "FreeResult", "descend", "solve_free"]

MODEL_LAYERS = 8
"""Layers up to which the event model decides: with 12, bounds of the program are better."""

_DESCENT_SHARE = 0.4
"""Of the time limit."""

_LEAST_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class FreeResult:
    """The best sequence found, over all 128 sets of switches, and a bound on all of them.

    Parameters
    ----------
    status
        Optimal where CP-SAT proves it, or HiGHS and CP-SAT agree; infeasible where that is proven in one of two ways,
        unconfirmed where HiGHS alone claims it.
    sequence, outcome
        Sets of switches with their simulated cost and peak, or None where nothing was found.
    bound
        No sequence within the limit costs less, as CP-SAT proves or HiGHS claims; None where nothing is known, nothing
        fits, or a sequence that was found costs less.
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
    model_layers: int = MODEL_LAYERS,
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
    model_layers
        Up to so many layers the event model decides.

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
    with ExitStack() as stack:
        ask = partial(_ask, pool if pool is not None else stack.enter_context(SolverPool()), step, chosen, deadline)
        return (_decided if len(step.layers) <= model_layers else _bounded)(step, best, ask)


Ask = Callable[..., tuple[list[tuple[int, ...]], Claim]]
"""From the name of a function of the worker and its arguments to the sequences that it found, and its claim."""


def _decided(step: H3tStep, best: H3tFound | None, ask: Ask) -> FreeResult:
    """By the event model."""
    found, claim = ask("decide", start=None if best is None else best.sequence)
    if claim.proved_infeasible:
        return FreeResult(Status.INFEASIBLE, None, None, None, claim.message)
    best = _fastest(step, found, best)
    if best is None:
        return FreeResult(Status.NO_SOLUTION, None, None, claim.bound, claim.message)
    status = Status.OPTIMAL if claim.bound == best.outcome.cost else Status.FEASIBLE
    return FreeResult(status, best.sequence, best.outcome, claim.bound, claim.message)


def _bounded(step: H3tStep, best: H3tFound | None, ask: Ask) -> FreeResult:
    """By the relaxed program."""
    cutoff = _slowest(step) if best is None else best.outcome.cost - 1
    found, claim = ask("bound", cutoff=cutoff)
    bound, status, message = claim.bound, Status.FEASIBLE, claim.message
    if bound is not None and bound > cutoff:
        _, second = ask("confirm", cutoff=cutoff)
        if best is None:
            status = Status.INFEASIBLE if second.proved_infeasible else Status.INFEASIBLE_UNCONFIRMED
            return FreeResult(status, None, None, None, f"{message}; {second.message}")
        status = Status.OPTIMAL if second.proved_infeasible else status
        bound = min(bound, best.outcome.cost)
    best = _fastest(step, found, best)
    if best is None:
        return FreeResult(Status.NO_SOLUTION, None, None, bound, message)
    if bound is not None and bound > best.outcome.cost:
        bound = None  # a plan that the simulator accepts refutes what HiGHS claimed
    return FreeResult(status, best.sequence, best.outcome, bound, message)


def _fastest(step: H3tStep, found: list[tuple[int, ...]], known: H3tFound | None) -> H3tFound | None:
    return fastest_of(step, [*found, *([] if known is None else [known.sequence])])


def _ask(
    workers: SolverPool, step: H3tStep, options: SolveOptions, deadline: float, function: str, **given: Any
) -> tuple[list[tuple[int, ...]], Claim]:
    """Sequences that a worker found, and its claim with the best bound on the way."""
    spec = SolverSpec(f"h3t_free_{function}", f"formulations.h3t.free_worker:{function}", {"step": step, **given})
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
