"""The price of memory: what the next bytes of a device buy, from plans and from bounds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from planner.common.units import format_bytes, format_seconds
from planner.explore.tables import AnyPlan, Table

GIB, MIB = 2**30, 2**20

NOT_SOLVED = "interrupted: some limits were not tried"
"""Reason of a limit that Ctrl-C left out."""

SHARES = (0.8, 0.9, 1.0, 1.1, 1.25)
"""Limits beside the present one, as shares of the bytes for tensors that the present plan needs or is limited to."""


@dataclass(frozen=True, slots=True)
class MemoryPrice:
    """What is known at one limit.

    Parameters
    ----------
    memory_bytes
        The limit of a device, the reserve included.
    plan
        The best plan within it, None where none was found.
    bound_seconds
        Below what no plan within it takes; None where nothing is proven.
    reason
        Why there is no plan.
    """

    memory_bytes: int
    plan: AnyPlan | None
    bound_seconds: float | None
    reason: str = ""

    @property
    def seconds(self) -> float | None:
        """Seconds a step of the plan."""
        return None if self.plan is None else self.plan.objective_seconds


@dataclass(frozen=True, slots=True)
class Marginal:
    """What the bytes between two limits buy, in seconds a step per GiB, or per MiB where limits are closer.

    Parameters
    ----------
    seconds
        By the plans found: at least 0, since a plan within less memory is one within more.
    least_seconds, most_seconds
        Between which the difference of the two optima is proven to be.
    """

    seconds: float | None = None
    least_seconds: float | None = None
    most_seconds: float | None = None


@dataclass(frozen=True, repr=False)
class MemoryPrices(Table):
    """Prices at some limits, ascending.

    Parameters
    ----------
    limits
        What is known at each limit.
    present_bytes
        The limit of the present plan.
    reserve_bytes
        Part of each limit that tensors cannot have.
    """

    limits: tuple[MemoryPrice, ...]
    present_bytes: int
    reserve_bytes: int = 0

    @property
    def unit(self) -> int:
        """Bytes that a marginal is for: a GiB, or a MiB where some limits are less than a sixteenth of a GiB apart."""
        closest = min((more.memory_bytes - less.memory_bytes for less, more in pairwise(self.limits)), default=GIB)
        return GIB if closest >= GIB // 16 else MIB

    @property
    def marginals(self) -> tuple[Marginal, ...]:
        """What the bytes above each limit buy, up to the next one; one less than there are limits."""
        return tuple(_marginal(less, more, self.unit) for less, more in pairwise(self.limits))

    def title(self) -> str:
        """What the next bytes above the present limit buy."""
        ahead = [
            (price, marginal)
            for price, marginal in zip(self.limits, self.marginals, strict=False)
            if price.memory_bytes >= self.present_bytes and marginal.seconds is not None
        ]
        if not ahead:
            return f"price of memory around {format_bytes(self.present_bytes)}"
        worth = format_seconds(ahead[0][1].seconds or 0.0)
        return f"above {format_bytes(ahead[0][0].memory_bytes)} a {self._unit_name} more saves {worth} a step"

    def rows(self) -> list[dict[str, Any]]:
        """A row per limit, with the worth of the bytes up to the next limit."""
        found = []
        for price, marginal in zip(self.limits, (*self.marginals, Marginal()), strict=True):
            found.append(
                {
                    "memory_bytes": price.memory_bytes,
                    "tensor_bytes": price.memory_bytes - self.reserve_bytes,
                    "seconds": price.seconds,
                    "bound_seconds": price.bound_seconds,
                    "peak_bytes": None if price.plan is None else price.plan.peak_bytes,
                    f"next_{self._unit_name}_saves_seconds": marginal.seconds,
                    "at_least_seconds": marginal.least_seconds,
                    "at_most_seconds": marginal.most_seconds,
                }
            )
        return found

    @property
    def _unit_name(self) -> str:
        return "GiB" if self.unit == GIB else "MiB"

    def notes(self) -> Sequence[str]:
        """Why there is no plan within some limits."""
        return list(dict.fromkeys(price.reason for price in self.limits if price.reason))


def _marginal(less: MemoryPrice, more: MemoryPrice, unit: int) -> Marginal:
    units = (more.memory_bytes - less.memory_bytes) / unit
    if less.seconds is None or more.seconds is None:
        return Marginal()
    low = None if less.bound_seconds is None else max(0.0, less.bound_seconds - more.seconds) / units
    high = None if more.bound_seconds is None else max(0.0, less.seconds - more.bound_seconds) / units
    return Marginal((less.seconds - more.seconds) / units, low, high)
