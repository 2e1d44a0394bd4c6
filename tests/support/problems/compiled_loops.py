"""The functions of a package that numba compiles, and whether its cache on disk has them."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from numba.core.dispatcher import Dispatcher


def compiled_loops(package: ModuleType) -> Iterator[Dispatcher]:
    """Compiled functions of all modules below a package, each once, in the module that defines it."""
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        module = importlib.import_module(found.name)
        for function in vars(module).values():
            if isinstance(function, Dispatcher) and function.py_func.__module__ == found.name:
                yield function


def is_cached(loop: Dispatcher) -> bool:
    """Whether the cache on disk holds some compiled version of the function."""
    module = loop.py_func.__module__.rpartition(".")[2]
    return any(Path(loop.stats.cache_path).glob(f"{module}.{loop.py_func.__qualname__}-*.nbi"))
