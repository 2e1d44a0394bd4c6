"""Measured over predicted peaks of layer plans: collected run by run, shown when all tests are over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

PROPERTY = "measured over predicted peak"
"""Property of a test under which it leaves its ratios."""


@dataclass(frozen=True)
class PeakRatio:
    """Measured over predicted peak of one stage: as the papers count it, and with what the engine holds."""

    run: str
    published: float
    engine: float


def summary(ratios: Sequence[PeakRatio]) -> list[str]:
    """Median and extremes of many ratios, as lines of text."""
    lines = [f"layer plans, measured / predicted peak of {len(ratios)} stages"]
    for title, kind in (("as the papers count", "published"), ("with the engine's own", "engine")):
        ordered = sorted(ratios, key=lambda ratio: getattr(ratio, kind))
        least, most = ordered[0], ordered[-1]
        middle = median(getattr(ratio, kind) for ratio in ratios)
        lines.append(
            f"  {title}: median {middle:.3f}, least {getattr(least, kind):.3f} ({least.run}), "
            f"most {getattr(most, kind):.3f} ({most.run})"
        )
    return lines
