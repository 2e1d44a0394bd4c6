"""Compiles the loops of CAPTURE's searches; :mod:`formulations.warm_up` calls it at installation."""

from __future__ import annotations

import numpy as np

from formulations.capture.enumeration import recommend
from formulations.capture.exact import fastest_plan, least_peak_plan
from formulations.capture.problem import PartitionProblem, stage_configurations
from formulations.capture.replay import StepTimes
from formulations.capture.slips import AS_PUBLISHED

__all__ = ["warm_up_capture"]


def warm_up_capture() -> None:
    """Cut three layers for two GPUs in every way."""
    configurations = stage_configurations((1, 2))
    sizes = np.arange(4) - np.arange(3)[:, None]
    allowed = np.broadcast_to(sizes > 0, (len(configurations), *sizes.shape)).copy()
    peaks = np.broadcast_to(sizes, (1, *allowed.shape)).copy()
    problem = PartitionProblem((2,), configurations, peaks, allowed)
    least_peak_plan(problem)
    least_peak_plan(problem, AS_PUBLISHED)
    recommend(problem)
    fastest_plan(problem, StepTimes(peaks[0], peaks[0], 2, 1.0))
