"""Gaps of solvers over time, over all instances of a benchmark, for plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from formulations.problem.solution import Status, relative_gap
from planner.benchmarks.rows import BenchRow

NO_GAP = 1.0
"""Gap that counts while an incumbent or a bound is missing."""

SHORTEST_SECONDS = 1e-3
"""Shorter times count as this, so that no ratio is about the clock."""

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Profile:
    """Gap of a solver over time, over all instances.

    Parameters
    ----------
    solver
        Its name.
    seconds
        Times at which something changes, for all solvers the same, shape ``(T,)``.
    mean_gap
        Mean over the instances of the gap from that time on, in [0, 1], shape ``(T,)``.
    share_within
        Share of the instances whose gap is within the target from that time on, shape ``(T,)``.
    """

    solver: str
    seconds: FloatArray
    mean_gap: FloatArray
    share_within: FloatArray


def gap_over_time(row: BenchRow) -> list[tuple[float, float]]:
    """Return the gap's steps as (seconds, gap), the first at 0.

    The gap is that of the contract, at most 1, and 1 while an incumbent or a bound is missing. An infeasible
    answer closes it when the solve ends.
    """
    steps = [(0.0, NO_GAP)]
    steps += [(moment.seconds, _gap(moment.objective, moment.bound)) for moment in row.history]
    if row.status is Status.INFEASIBLE:
        steps.append((row.seconds, 0.0))
    return steps


def profiles(rows: Sequence[BenchRow], target: float) -> list[Profile]:
    """Return the profile of every solver over all instances of the rows.

    An instance that a solver has no row for counts as one on which it found nothing.

    Parameters
    ----------
    rows
        At most one per instance and solver.
    target
        Largest gap that counts as solved.
    """
    steps = {(row.instance, row.solver): gap_over_time(row) for row in rows}
    instances = list(dict.fromkeys(row.instance for row in rows))
    ends = [row.seconds for row in rows]
    seconds = np.unique([0.0, *ends, *(second for found in steps.values() for second, _ in found)])
    made = []
    for solver in dict.fromkeys(row.solver for row in rows):
        curves = [_sampled(steps.get((instance, solver), [(0.0, NO_GAP)]), seconds) for instance in instances]
        gaps = np.array(curves)
        made.append(Profile(solver, seconds, gaps.mean(axis=0), (gaps <= target).mean(axis=0)))
    return made


def ratios_to_fastest(rows: Sequence[BenchRow], target: float) -> dict[str, FloatArray]:
    """Times to a gap as multiples of the fastest solver's, by solver (Dolan and Moré 2002, the ratios r_ps).

    Parameters
    ----------
    rows
        At most one per instance and solver.
    target
        Largest gap that counts as solved.

    Returns
    -------
    dict
        Per solver an array over the instances, infinite where it does not solve one or has no row for it.
    """
    instances, solvers = (
        list(dict.fromkeys(names)) for names in ((r.instance for r in rows), (r.solver for r in rows))
    )
    times = np.full((len(solvers), len(instances)), np.inf)
    for row in rows:
        reached = [second for second, gap in gap_over_time(row) if gap <= target]
        place = solvers.index(row.solver), instances.index(row.instance)
        times[place] = max(min(reached, default=np.inf), SHORTEST_SECONDS)
    fastest = times.min(axis=0)
    ratios = np.where(np.isfinite(times), times / np.where(np.isfinite(fastest), fastest, 1.0), np.inf)
    return dict(zip(solvers, ratios, strict=True))


def _gap(objective: int | None, bound: int | None) -> float:
    gap = relative_gap(objective, bound)
    return NO_GAP if gap is None else min(gap, NO_GAP)


def _sampled(steps: Sequence[tuple[float, float]], seconds: FloatArray) -> FloatArray:
    """Return the gap at each of the times; steps are in order of time."""
    starts, gaps = (np.array(values) for values in zip(*steps, strict=True))
    return np.asarray(gaps[np.searchsorted(starts, seconds, side="right") - 1], dtype=np.float64)
