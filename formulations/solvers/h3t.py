"""H3T with synchronization as a free switch: plans by descent, bounds by HiGHS on a relaxation, the simulator judges.

The descent begins with the best plan that is known and changes the switches of one layer at a time. HiGHS then looks
for anything cheaper (:mod:`formulations.models.h3t_program`); what the simulator finds too large is forbidden.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from formulations.models.h3t import H3tStep, Outcome, simulate, simulate_sequences
from formulations.models.h3t_operations import ALL_ON, SETS
from formulations.problem import StrategyProblem
from formulations.solution import SolveOptions
from formulations.solvers.h3t_worker import step_as_text
from formulations.solvers.ledger import SolverContradiction
from formulations.solvers.registry import SolverSpec
from formulations.solvers.worker import Listener, SolverPool

__all__ = ["FreeResult", "descend", "solve_free"]

_DESCENT_SHARE = 0.4
"""Of the time limit."""


@dataclass(frozen=True, slots=True)
class FreeResult:
    """The best sequence found, over all 128 sets of switches, and a bound on all of them.

    Parameters
    ----------
    sequence, outcome
        Sets of switches with their simulated cost and peak, or None where nothing was found.
    bound
        No sequence within the limit costs less; None where nothing is known.
    cpu_seconds, peak_rss_bytes
        Of the worker.
    message
        Its words.
    """

    sequence: tuple[int, ...] | None
    outcome: Outcome | None
    bound: int | None
    cpu_seconds: float
    peak_rss_bytes: int
    message: str

    @property
    def is_optimal(self) -> bool:
        """Whether nothing is better, proven."""
        return self.outcome is not None and self.outcome.cost == self.bound


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
    SolverContradiction
        If a bound exceeds the cost of a simulated plan.
    """
    chosen = options or SolveOptions()
    deadline = time.monotonic() + chosen.time_limit
    best = _fastest_of(step, (*starts, (int(ALL_ON),) * len(step.layers)))
    if best is not None:
        best = descend(step, best, time.monotonic() + _DESCENT_SHARE * chosen.time_limit)
    cutoff = _slowest(step) if best is None else simulate(step, best).cost - 1
    found: list[tuple[int, ...]] = [] if best is None else [best]
    spec = SolverSpec(
        "h3t_free", "formulations.solvers.h3t_worker:solve", {"step": step_as_text(step), "cutoff": cutoff}
    )
    limits = replace(chosen, time_limit=max(0.1, deadline - time.monotonic()))
    workers = pool if pool is not None else SolverPool()
    bounds: list[int] = []
    listener = Listener(
        lambda progress: bounds.append(progress.bound) if progress.bound is not None else None, found.extend
    )
    try:
        outcome = workers.run(spec, StrategyProblem("h3t", (), (), (), 0), limits, listener)
    finally:
        if pool is None:
            workers.close()
    claim = outcome.claim
    if claim is not None:
        found += [] if claim.choices is None else [claim.choices]
        bounds += [] if claim.bound is None else [claim.bound]
    best, bound = _fastest_of(step, found), max(bounds, default=None)
    simulated = None if best is None else simulate(step, best)
    if simulated is not None and bound is not None and bound > simulated.cost:
        raise SolverContradiction(f"h3t: a bound of {bound}, but a plan that fits costs {simulated.cost}")
    message = outcome.message if claim is None else claim.message
    return FreeResult(best, simulated, bound, outcome.cpu_seconds, outcome.peak_rss_bytes, message)


def descend(step: H3tStep, start: tuple[int, ...], deadline: float) -> tuple[int, ...]:
    """Change the switches of one layer at a time as long as that is faster and fits; the best change first."""
    best, cost = start, simulate(step, start).cost
    count = len(start)
    while time.monotonic() < deadline:
        sequences = np.repeat(np.array([best], dtype=np.int64), SETS * count, axis=0)
        rows = np.arange(SETS * count)
        sequences[rows, rows // SETS] = rows % SETS
        found = simulate_sequences(step, sequences)
        found[found[:, 1] > step.memory_limit, 0] = np.iinfo(np.int64).max
        row = int(found[:, 0].argmin())
        if found[row, 0] >= cost:
            break
        best, cost = tuple(sequences[row].tolist()), int(found[row, 0])
    return best


def _fastest_of(step: H3tStep, sequences: Iterable[tuple[int, ...]]) -> tuple[int, ...] | None:
    """The fastest that fits."""
    best: tuple[int, tuple[int, ...]] | None = None
    for sequence in sequences:
        outcome = simulate(step, sequence)
        if outcome.peak <= step.memory_limit and (best is None or outcome.cost < best[0]):
            best = outcome.cost, sequence
    return None if best is None else best[1]


def _slowest(step: H3tStep) -> int:
    """More than any plan takes: everything happens, one after the other."""
    durations = step.durations()
    reloads = sum(layer.shard_copy for layer in step.layers)
    return int(durations[durations > 0].sum()) + reloads + step.final_cost
