"""Compilation of this package's hot loops, and the seed of their random numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np

_Function = TypeVar("_Function", bound=Callable[..., Any])


def compiled(function: _Function) -> _Function:
    """Compile a function to machine code on its first call and cache it on disk.

    Floating-point operations may be reordered (min and sum loops vectorise), so compiled code must
    not have infinities or NaN as input: large finite numbers stand for forbidden entries.
    """
    return cast(_Function, numba.njit(cache=True, fastmath=True, error_model="numpy")(function))


@compiled
def seed_compiled(seed: int) -> None:
    """Seed the random numbers of all compiled functions (they have a state of their own)."""
    np.random.seed(seed)  # noqa: NPY002  (inside compiled code this is the only generator)
