"""How far a gradient may be from one process's: the rounding of one process decides, not a number for a whole dtype.

Single precision has digits enough that a relative difference of 1e-4 is an error. In half precision, and where a
gradient is rounding alone (a convolution's bias before a batch norm), it may not be. Then one process computes the
first step once more in a wider dtype. What rounding took from its own gradient is what a correct run may lose: at most
twice as far from the precise gradient, so at most three times as far from one process's.

A flipped sign, a zeroed gradient or a dropped reduction changes a gradient by half of itself or more, in any dtype. No
tolerance reaches that (:data:`MOST_ROUNDING`), but that of a gradient which is rounding alone in one process as well.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import isnan
from pathlib import Path
from statistics import median

from formulations.problem.files import write_text_atomically

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
"""Largest relative differences from one process that pass wherever rounding is less."""

ROUNDINGS = 3.0
"""How many times one process's own rounding error a difference from it may be."""

MOST_ROUNDING = 0.3
"""Largest relative difference that the rounding of a typical gradient, or of the loss, excuses."""

ROUNDING_FILE = "rounding.json"

WIDER = {"float16": "float32", "bfloat16": "float32", "float32": "float64", "float64": "float64"}
"""The dtype that shows the rounding of another."""


@dataclass(frozen=True, slots=True)
class WorstError:
    """A relative error, the tensor that has it, and the error up to which that tensor passes."""

    error: float
    name: str
    tolerance: float = GRADIENT_TOLERANCE

    def worse_of(self, other: WorstError) -> WorstError:
        """The larger of two errors beside their tolerances; NaN counts as the largest."""
        if isnan(self.error) or other.error / other.tolerance <= self.error / self.tolerance:
            return self
        return other


NO_ERROR = WorstError(0.0, "")


@dataclass(frozen=True)
class Rounding:
    """Relative errors of one process's first step beside the same step in a wider dtype.

    Parameters
    ----------
    loss
        Of the loss.
    gradients
        Of each parameter's gradient, as :mod:`runtime.measure.comparison` scales it.
    """

    loss: float
    gradients: Mapping[str, float]

    def tolerance(self, name: str) -> float:
        """Relative error up to which a gradient passes; rounding that is usual counts where its own is less."""
        if ROUNDINGS * self._typical > MOST_ROUNDING:  # not rounding: the wider step was another one
            return MOST_ROUNDING
        return max(GRADIENT_TOLERANCE, ROUNDINGS * max(self.gradients.get(name, 0.0), self._usual))

    @cached_property
    def _typical(self) -> float:
        return median(self.gradients.values()) if self.gradients else 0.0

    @cached_property
    def _usual(self) -> float:
        """Rounding that any gradient may have: that of a typical one, in half precision that of the upper tenth.

        In half precision every gradient is rounded, and some lose less by chance. Those that are rounding alone excuse
        no other.
        """
        if self._typical <= GRADIENT_TOLERANCE:
            return self._typical
        ordered = sorted(error for error in self.gradients.values() if error < MOST_ROUNDING / ROUNDINGS)
        return max(self._typical, ordered[len(ordered) * 9 // 10] if ordered else 0.0)

    @property
    def loss_tolerance(self) -> float:
        """Relative error up to which the loss passes."""
        return max(LOSS_TOLERANCE, min(MOST_ROUNDING, ROUNDINGS * self.loss))


NO_ROUNDING = Rounding(0.0, {})


def worst_of(errors: Mapping[str, float], rounding: Rounding = NO_ROUNDING) -> WorstError:
    """The worst of relative errors by name, each beside its tolerance."""
    worst = NO_ERROR
    for name, error in errors.items():
        worst = worst.worse_of(WorstError(error, name, rounding.tolerance(name)))
    return worst


def loss_error(loss: float, expected: float) -> float:
    """Relative difference of a loss from one process's."""
    return abs(loss - expected) / (abs(expected) or 1.0)


def write_rounding(rounding: Rounding, folder: Path) -> None:
    """Write rounding errors for the ranks."""
    content = {"loss": rounding.loss, "gradients": dict(rounding.gradients)}
    write_text_atomically(folder / ROUNDING_FILE, json.dumps(content))


def read_rounding(folder: Path) -> Rounding:
    """Read what :func:`write_rounding` wrote."""
    return Rounding(**json.loads((folder / ROUNDING_FILE).read_text(encoding="utf-8")))
