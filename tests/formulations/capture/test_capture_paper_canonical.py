"""CAPTURE's canonical problem: its least limit beside the dynamic program and all plans."""

from __future__ import annotations

import pytest
from support.problems.capture_problems import all_plans, bytes_of_gpus, random_partition

from formulations.capture.canonical import capture_problem, least_peak_by_solver
from formulations.capture.exact import least_peak_plan


@pytest.mark.parametrize(
    "seeds", [range(60), pytest.param(range(60, 1000), marks=pytest.mark.fuzz)], ids=["few", "more"]
)
def test_the_least_limit_is_the_least_peak_of_all_plans(seeds: range) -> None:
    """Ties, stages that hold nothing, one node, one configuration and limits that are just met are among them."""
    proven = 0
    for problem in filter(None, map(random_partition, seeds)):
        capture_problem(problem, 0).validate()
        found = least_peak_by_solver(problem)
        peaks = [max(bytes_of_gpus(problem, plan)) for plan in all_plans(problem)]
        assert (found is None) == (not peaks)
        if found is not None:
            assert problem.is_plan(found)
            assert problem.peak(found) == problem.peak(least_peak_plan(problem)) == min(peaks)
            proven += 1
    assert proven > 0.4 * len(seeds)


def test_without_a_stage_for_the_first_layer_there_is_no_plan() -> None:
    problem = next(filter(None, map(random_partition, range(9))))
    problem.allowed[:, 0] = False
    assert least_peak_by_solver(problem) is None
