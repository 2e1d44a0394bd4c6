"""A live line on the terminal for work that takes more than a second."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.live import Live
from rich.text import Text

from formulations.problem.solution import relative_gap
from planner.common.units import format_gap, format_seconds

if TYPE_CHECKING:
    from formulations.problem.solution import Progress

SILENT_SECONDS = 1.0


class ProgressLine:
    """Shows the seconds so far and, once a solver reports, its incumbent, bound and gap.

    Parameters
    ----------
    what
        Name of the work, shown until a report names a solver.
    seconds_per_cost
        Length of the cost quantum in seconds, or None to print bare numbers.
    """

    def __init__(self, what: str, seconds_per_cost: float | None) -> None:
        self.what = what
        self.seconds_per_cost = seconds_per_cost
        self.started = time.monotonic()
        self.latest: Progress | None = None

    def begin(self, what: str) -> None:
        """Show other work, from now on."""
        self.what, self.started, self.latest = what, time.monotonic(), None

    def __call__(self, progress: Progress) -> None:
        """Take a report; drawing happens at the line's own rate."""
        self.latest = progress

    def __rich__(self) -> Text:
        """Draw the line; empty in the first second."""
        elapsed = time.monotonic() - self.started
        if elapsed < SILENT_SECONDS:
            return Text()
        words = [f"{elapsed:6.1f} s"]
        if self.latest is None:
            return Text("  ".join([*words, self.what]))
        words.append(self.latest.source)
        ends = ("incumbent", self.latest.incumbent), ("bound", self.latest.bound)
        words += [f"{name} {self.cost(value)}" for name, value in ends if value is not None]
        gap = relative_gap(self.latest.incumbent, self.latest.bound)
        if gap is not None:
            words.append(f"gap {format_gap(gap)}")
        return Text("  ".join(words))

    def cost(self, value: int) -> str:
        """Print a cost in seconds where the quantum is known."""
        return f"{value}" if self.seconds_per_cost is None else format_seconds(value * self.seconds_per_cost)


@contextmanager
def progress_line(what: str, seconds_per_cost: float | None = None) -> Iterator[ProgressLine]:
    """Draw a :class:`ProgressLine` on stderr while the block runs; nothing where stderr is no terminal."""
    line = ProgressLine(what, seconds_per_cost)
    with Live(line, console=Console(stderr=True), transient=True, refresh_per_second=4):
        yield line
