"""Compiled loops of solvers: :func:`compiled`, and the seed of their random numbers."""

from __future__ import annotations

import numpy as np

from formulations.compiled import compiled

__all__ = ["compiled", "seed_compiled"]


@compiled
def seed_compiled(seed: int) -> None:
    """Seed the random numbers of all compiled functions (they have a state of their own)."""
    np.random.seed(seed)  # noqa: NPY002  (inside compiled code this is the only generator)
