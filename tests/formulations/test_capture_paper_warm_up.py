"""The installation compiles CAPTURE's loops, and no later search compiles another version of one."""

from __future__ import annotations

from pathlib import Path

from numba.core.dispatcher import Dispatcher
from support.capture_problems import all_plans, random_partition, random_times

from formulations.models.capture_slips import AS_PUBLISHED
from formulations.searches import capture_enumeration, capture_kernels
from formulations.searches.capture_enumeration import recommend, search_mcap
from formulations.searches.capture_exact import fastest_plan, least_peak_plan
from formulations.searches.capture_warm_up import warm_up_capture


def loops() -> dict[str, Dispatcher]:
    return {
        f"{module.__name__}.{name}": function
        for module in (capture_enumeration, capture_kernels)
        for name, function in vars(module).items()
        if isinstance(function, Dispatcher) and function.py_func.__module__ == module.__name__
    }


def test_every_compiled_loop_is_in_the_cache_afterwards() -> None:
    warm_up_capture()
    assert len(loops()) == 6
    for function in loops().values():
        stem = function.py_func.__module__.rpartition(".")[2]
        cached = Path(function.stats.cache_path).glob(f"{stem}.{function.py_func.__qualname__}-*.nbi")
        assert any(cached), function.py_func.__qualname__


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
