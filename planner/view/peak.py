"""The tensors alive at the peak: the largest by name, and how many others there are."""

from __future__ import annotations

from dataclasses import dataclass

from planner.replay.report import AliveTensor, ReplayReport
from planner.replay.wording import placement_text


@dataclass(frozen=True, slots=True)
class AtPeak:
    """Tensors alive at the peak.

    Parameters
    ----------
    largest
        The largest ones, in this order.
    others
        The others, the largest first as well.
    """

    largest: tuple[AliveTensor, ...]
    others: tuple[AliveTensor, ...]

    @property
    def other_bytes(self) -> int:
        """Bytes of the others on one device."""
        return sum(tensor.nbytes for tensor in self.others)


def at_peak(report: ReplayReport, count: int) -> AtPeak:
    """Tensors alive at the peak of a replay, `count` of them as the largest."""
    return AtPeak(report.alive_at_peak[:count], report.alive_at_peak[count:])


def placement_of(tensor: AliveTensor) -> str:
    """Placement of a tensor as text; empty where it is no buffer of the schedule."""
    return placement_text(tensor.placement) if tensor.placement else ""
