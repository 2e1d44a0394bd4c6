"""The installation compiles H3T's loops, on a step whose limit binds."""

from __future__ import annotations

from pathlib import Path

from numba.core.dispatcher import Dispatcher

from formulations.models import h3t_simulator
from formulations.models.h3t import simulate
from formulations.searches import h3t_dp
from formulations.searches.h3t_warm_up import warm_up_h3t, warm_up_step


def test_memory_binds() -> None:
    step = warm_up_step()
    assert simulate(step, [0, 0]).peak > step.memory_limit >= simulate(step, [127, 127]).peak


def test_every_compiled_loop_is_in_the_cache_afterwards() -> None:
    warm_up_h3t()
    loops = 0
    for module in (h3t_simulator, h3t_dp):
        for function in vars(module).values():
            if isinstance(function, Dispatcher):
                loops += 1
                stem = module.__name__.rpartition(".")[2]
                cached = Path(function.stats.cache_path).glob(f"{stem}.{function.py_func.__qualname__}-*.nbi")
                assert any(cached), function.py_func.__qualname__
    assert loops == 7
