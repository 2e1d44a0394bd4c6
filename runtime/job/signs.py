"""What a rank says of itself to the others, and how long things of a kind took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Sign:
    """Sign of life of a rank.

    Parameters
    ----------
    beat
        Number that each sign has anew.
    progress
        Steps and evaluations begun and ended.
    inside
        What it is in the middle of (``step 3``); empty between two.
    first
        Whether that is the first of its kind, before which a rank may do nothing for long.
    at
        File, line and function of its main thread.
    waits
        Whether that is a collective, or waits for the device.
    process
        Name of its process (:mod:`runtime.job.local_processes`).
    """

    beat: int
    progress: int
    inside: str
    first: bool
    at: str
    waits: bool
    process: str = ""


@dataclass(slots=True)
class Longest:
    """The longest of a kind, without the first where there are others.

    Parameters
    ----------
    count
        How many have ended.
    seconds
        The longest of them.
    """

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one more."""
        self.seconds = max(self.seconds, seconds) if self.count > 1 else seconds
        self.count += 1
