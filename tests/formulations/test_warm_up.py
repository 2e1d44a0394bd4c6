from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

import pytest
from numba.core.dispatcher import Dispatcher

import formulations.formats
import formulations.presolve
import formulations.searches
import formulations.solvers
from formulations import warm_up
from formulations.checker import check
from formulations.solvers import solve_in_process


@pytest.mark.parametrize("limit_bytes", warm_up.LIMITS_BYTES)
def test_the_limit_binds_and_can_be_met(limit_bytes: int) -> None:
    problem = warm_up.warm_up_problem(limit_bytes)
    problem.validate()
    result = solve_in_process(problem, "lagrangian", warm_up.OPTIONS)
    assert result.choices is not None
    assert check(problem, result.choices).ok
    cheapest = tuple(int(node.cost.argmin()) for node in problem.nodes)
    assert not check(problem, cheapest).ok


def test_every_compiled_loop_is_in_the_cache_afterwards() -> None:
    warm_up.main()
    missing = []
    packages = (formulations.solvers, formulations.searches, formulations.presolve, formulations.formats)
    names = [
        f"{package.__name__}.{module.name}" for package in packages for module in pkgutil.iter_modules(package.__path__)
    ]
    for name in names:
        for function in vars(importlib.import_module(name)).values():
            if isinstance(function, Dispatcher) and function.py_func.__module__ == name:
                files = Path(function.stats.cache_path).glob(
                    f"{name.rpartition('.')[2]}.{function.py_func.__qualname__}-*.nbi"
                )
                missing += [] if any(files) else [f"{name}.{function.py_func.__qualname__}"]
    assert missing == []
