from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from numba.core.dispatcher import Dispatcher

import formulations.searches
from formulations.searches.galvatron_dp import search_stage
from formulations.searches.galvatron_warm_up import _tables, warm_up_galvatron


def test_memory_binds() -> None:
    tables = _tables()
    assert search_stage(tables.stage(0, 3, 2, 14), 1).cost > search_stage(tables.stage(0, 3, 2, 100), 1).cost


def test_every_compiled_loop_of_the_searches_is_reached() -> None:
    warm_up_galvatron()
    loops = 0
    for module in pkgutil.iter_modules(formulations.searches.__path__):
        if not module.name.startswith("galvatron"):
            continue
        name = f"{formulations.searches.__name__}.{module.name}"
        for function in vars(importlib.import_module(name)).values():
            if isinstance(function, Dispatcher) and function.py_func.__module__ == name:
                loops += 1
                assert function.signatures, function.py_func.__qualname__
                cached = Path(function.stats.cache_path).glob(f"{module.name}.{function.py_func.__qualname__}-*.nbi")
                assert any(cached), function.py_func.__qualname__
    assert loops == 12
