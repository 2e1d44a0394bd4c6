"""No search compiles another version of a loop than the installation does."""

from __future__ import annotations

from numba.core.dispatcher import Dispatcher
from support.problems.capture_problems import all_plans, random_partition, random_times
from support.problems.compiled_loops import compiled_loops

import formulations.capture
from formulations.capture.enumeration import recommend, search_mcap
from formulations.capture.exact import fastest_plan, least_peak_plan
from formulations.capture.slips import AS_PUBLISHED
from formulations.capture.warm_up import warm_up_capture


def loops() -> dict[str, Dispatcher]:
    return {f"{x.py_func.__module__}.{x.py_func.__qualname__}": x for x in compiled_loops(formulations.capture)}


def test_searches_compile_nothing_more() -> None:
    warm_up_capture()
    before = {name: len(function.signatures) for name, function in loops().items()}
    searched = 0
    for seed in range(30):
        problem = random_partition(seed)
        if problem is None or not any(True for _ in all_plans(problem)):
            continue
        searched += 1
        least_peak_plan(problem)
        least_peak_plan(problem, AS_PUBLISHED)
        fastest_plan(problem, random_times(seed, problem))
        if len(problem.peaks) == 1:
            recommend(problem)
            if problem.gpus <= problem.layers:
                search_mcap(problem)
    assert searched > 10
    assert {name: len(function.signatures) for name, function in loops().items()} == before
