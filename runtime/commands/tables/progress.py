"""A live line on standard error for work that takes more than a second; lines of a log where that is no terminal."""

from __future__ import annotations

import sys
import threading
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
FIRST_LINE_SECONDS, MOST_SECONDS_BETWEEN_LINES = 2.0, 60.0
"""Without a terminal: when the first line is printed. Each pause is twice the one before, up to the second number."""


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
        self.named = False

    def begin(self, what: str, *, named: bool = False) -> None:
        """Show other work, from now on; ``named`` keeps its name beside what a solver reports."""
        self.what, self.started, self.latest, self.named = what, time.monotonic(), None, named

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
        words += [self.what] * self.named + [self.latest.source]
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
    """Draw a :class:`ProgressLine` on standard error while the block runs.

    Where that is no terminal, the line is printed now and then, after two seconds for the first time.
    """
    line, console = ProgressLine(what, seconds_per_cost), Console(stderr=True)
    if not console.is_terminal:
        with _printed(line):
            yield line
        return
    # What is printed meanwhile goes above the line, but into a pipe or file where standard output is one.
    with Live(line, console=console, transient=True, refresh_per_second=4, redirect_stdout=sys.stdout.isatty()):
        yield line


@contextmanager
def _printed(line: ProgressLine) -> Iterator[None]:
    """Print the line at growing intervals while the block runs."""
    stream, over = sys.stderr, threading.Event()

    def log() -> None:
        pause = FIRST_LINE_SECONDS
        while not over.wait(pause):
            text = line.__rich__().plain
            if text:
                print(text, file=stream, flush=True)
            pause = min(2.0 * pause, MOST_SECONDS_BETWEEN_LINES)

    thread = threading.Thread(target=log, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
