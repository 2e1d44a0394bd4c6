"""Scaling of the loss for float16, as ``torch.amp.GradScaler`` does it, with one decision on all ranks.

Gradients of 16 bits below 6e-8 are 0, so the loss is multiplied by a large power of two and gradients are divided by it
in 32 bits (Micikevicius et al. 2018, section 3.2). Where one overflows, the step is skipped and the scale is lowered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite


@dataclass(frozen=True, slots=True)
class LossScaling:
    """Settings of the scale; names and defaults are those of ``torch.amp.GradScaler``."""

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000


class LossScale:
    """The scale of the loss from step to step.

    Attributes
    ----------
    value
        The scale.
    skipped
        Steps without an update, because a gradient overflowed.
    """

    def __init__(self, settings: LossScaling) -> None:
        self._settings = settings
        self.value = settings.init_scale
        self._grown = 0
        self.skipped = 0

    def after_step(self, finite: bool) -> None:
        """Set the scale of the next step by whether all gradients of this one were finite."""
        if not finite:
            self.value *= self._settings.backoff_factor
            self._grown = 0
            self.skipped += 1
            return
        self._grown += 1
        if self._grown == self._settings.growth_interval:
            larger = self.value * self._settings.growth_factor
            self.value = larger if isfinite(larger) else self.value
            self._grown = 0

    def state_dict(self) -> dict[str, float]:
        """Plain values for a checkpoint."""
        return {"value": self.value, "grown": self._grown, "skipped": self.skipped}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Continue from :meth:`state_dict`."""
        self.value, self._grown, self.skipped = state["value"], int(state["grown"]), int(state["skipped"])
