"""Random plans of CAPTURE's problem, all equally likely, and how far predictions of them are off (its Figure 7)."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from formulations.capture.predictor import FloatArray
from formulations.capture.problem import CapturePlan, PartitionProblem, PlannedStage, TraceError

__all__ = ["PredictionErrors", "prediction_errors", "random_plans"]


@dataclass(frozen=True, slots=True, eq=False)
class PredictionErrors:
    """Errors relative to what is really held; positive where too much is predicted.

    Parameters
    ----------
    per_gpu
        Of every GPU of every plan.
    per_plan
        Of the fullest GPU of every plan.
    """

    per_gpu: FloatArray
    per_plan: FloatArray

    def within(self, share: float) -> tuple[float, float]:
        """Return which shares of the predictions for GPUs and for plans are off by at most so much."""
        return float(np.mean(np.abs(self.per_gpu) <= share)), float(np.mean(np.abs(self.per_plan) <= share))


def random_plans(
    problem: PartitionProblem, count: int, seed: int, accepts: Callable[[CapturePlan], bool] = lambda _: True
) -> list[CapturePlan]:
    """Draw plans, with repetition.

    Parameters
    ----------
    problem
        Stages and GPUs.
    count, seed
        How many, and of what random numbers.
    accepts
        Plans for which it is false are drawn again.

    Raises
    ------
    TraceError
        There is no plan, or a thousand in a row were not accepted.
    """
    degrees, room = problem.degrees.tolist(), problem.room.tolist()

    @cache
    def ways(first: int, gpu: int) -> int:
        return sum(number for _, number in steps(first, gpu)) if gpu < problem.gpus else int(first == problem.layers)

    @cache
    def steps(first: int, gpu: int) -> tuple[tuple[PlannedStage, int], ...]:
        return tuple(
            (PlannedStage(end, c), ways(end, gpu + degrees[c]))
            for end in range(first + 1, problem.layers + 1)
            for c in range(len(degrees))
            if degrees[c] <= room[gpu] and problem.allowed[c, first, end] and ways(end, gpu + degrees[c])
        )

    if not ways(0, 0):
        raise TraceError(f"no plan of {problem.layers} layers on {problem.gpus} GPUs is possible")
    numbers = random.Random(seed)
    found: list[CapturePlan] = []
    refused = 0
    while len(found) < count:
        plan: list[PlannedStage] = []
        first, gpu = 0, 0
        while gpu < problem.gpus:
            stages, weights = zip(*steps(first, gpu), strict=True)
            stage = numbers.choices(stages, weights)[0]
            plan.append(stage)
            first, gpu = stage.end, gpu + degrees[stage.configuration]
        if accepts(tuple(plan)):
            found.append(tuple(plan))
            refused = 0
        else:
            refused += 1
            if refused == 1000:
                raise TraceError("a thousand random plans in a row were not accepted; allow more memory")
    return found


def prediction_errors(predicted: Sequence[Sequence[int]], held: Sequence[Sequence[int]]) -> PredictionErrors:
    """Compare predictions with what is held.

    Parameters
    ----------
    predicted, held
        For every plan the bytes of every GPU; the latter positive.
    """
    pairs = list(zip(predicted, held, strict=True))
    per_gpu = [a / b - 1 for said, true in pairs for a, b in zip(said, true, strict=True)]
    per_plan = [max(said) / max(true) - 1 for said, true in pairs]
    return PredictionErrors(np.array(per_gpu), np.array(per_plan))
