"""A pool of gloo ranks that stays alive between tests.

A function is named by its file and name, so it can stand beside the test that uses it; it is called as
``function(*args)`` on every rank, where ``torch.distributed`` is initialised, and must be at the top level of its file.
"""

from __future__ import annotations

import atexit
import importlib.util
import inspect
import sys
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from runtime.job import rank_pool
from runtime.job.process_group import LaunchError

IMPORTED = (
    *rank_pool.IMPORTED,
    "runtime.operators.executor",
    "torch._dynamo",
    "torch.testing",
    *(f"transformers.models.{name}.modeling_{name}" for name in ("gpt2", "llama", "bert", "t5", "vit")),
)


class RankPool:
    """``size`` ranks; started by the first call, and again by the next one after an error or a hang."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._ranks: rank_pool.RankPool | None = None
        atexit.register(self.close)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 120.0) -> list[Any]:
        """Call ``function(*args)`` on all ranks and return their results.

        Raises
        ------
        LaunchError
            If a rank raises; names the rank and holds its traceback. If ranks do not answer in ``timeout`` seconds.
        """
        if self._ranks is None:
            self._ranks = rank_pool.RankPool(self.size, IMPORTED)
        try:
            return self._ranks.run(_call, inspect.getfile(function), function.__qualname__, args, timeout=timeout)
        except LaunchError:
            self._ranks = None  # which has ended its processes
            raise

    def close(self) -> None:
        """End the ranks."""
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


def _call(path: str, name: str, args: tuple[Any, ...]) -> Any:
    """Call a function of a file, on a rank."""
    return getattr(_loaded(path), name)(*args)


@cache
def _loaded(path: str) -> ModuleType:
    name = f"rank_functions_{abs(hash(path))}"
    specification = importlib.util.spec_from_file_location(name, path)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[name] = module
    specification.loader.exec_module(module)
    return module
