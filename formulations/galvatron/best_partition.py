"""Results of solved windows in the joint search of Galvatron-BMW, and the best partition into windows."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from formulations.galvatron.labels import StageResult
from formulations.galvatron.windows import IMPOSSIBLE
from formulations.problem.strategy_problem import IntArray

__all__ = ["SolvedWindow", "best_partition"]


@dataclass(slots=True)
class SolvedWindow:
    """Results of one run of layers at one number of micro-batches in flight.

    Parameters
    ----------
    solved
        Limits on a micro-batch, the result under each, and the time of a micro-batch of its plan.
    """

    solved: list[tuple[int | None, StageResult, int]] = field(default_factory=list)

    def bound_at(self, limit: int | None) -> int:
        """The best bound under a limit, from solves with this limit or a larger one."""
        bounds = [_bound_of(result) for solved, result, _ in self.solved if _allows(solved, limit)]
        return max(bounds, default=0)

    def plan_at(self, limit: int | None) -> StageResult | None:
        """The result of a solve with this limit or a larger one whose plan keeps this limit, or None."""
        for solved, result, repeated in self.solved:
            if result.choices is not None and _allows(solved, limit) and (limit is None or repeated <= limit):
                return result
        return None


def _bound_of(result: StageResult) -> int:
    return IMPOSSIBLE if result.bound is None else result.bound


def _allows(solved: int | None, limit: int | None) -> bool:
    """Whether a limit that was solved is as large as another; None is no limit."""
    return solved is None or (limit is not None and solved >= limit)


def best_partition(bounds: IntArray | NDArray[np.float64], combine: np.ufunc = np.add) -> tuple[Any, tuple[int, ...]]:
    """Find the best partition of layers into the stages of a pipeline; every stage has a layer.

    Parameters
    ----------
    bounds
        Of the windows at every position, shape ``(P, L + 1, L + 1)``, indexed by the first layer and the end: integers
        below :data:`~formulations.galvatron.windows.IMPOSSIBLE`, or floats.
    combine
        Joins the bounds of the windows of a partition: their sum, or the largest.

    Returns
    -------
    bound, borders
        That of the partition, and its ``P + 1`` borders.
    """
    stages, size, _ = bounds.shape
    none = IMPOSSIBLE if np.issubdtype(bounds.dtype, np.integer) else np.inf
    best = np.full(size, none, dtype=bounds.dtype)
    best[0] = 0
    sources = []
    for position in range(stages):
        through = np.minimum(combine(best[:, None], bounds[position]), none)
        sources.append(through.argmin(axis=0))
        best = through.min(axis=0)
    borders = [size - 1]
    for source in reversed(sources):
        borders.append(int(source[borders[-1]]))
    return best[-1].item(), tuple(reversed(borders))
