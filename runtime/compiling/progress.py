"""Lines about a plan that takes long, on stderr: what is known of it so far."""

from __future__ import annotations

import sys
import time

from formulations.problem.solution import Progress, relative_gap
from planner.common.units import format_gap, format_seconds

EVERY_SECONDS = 2.0
"""Least seconds from one line to the next, and from the solver's start to the first."""


class ProgressLines:
    """Prints the best step, the bound and the gap now and then; to be called with a solver's reports."""

    def __init__(self) -> None:
        self._printed = 0.0

    def __call__(self, progress: Progress) -> None:
        """Take a report, with costs in nanoseconds."""
        now = time.monotonic()
        if progress.seconds < EVERY_SECONDS or now - self._printed < EVERY_SECONDS:
            return
        self._printed = now
        words = [f"planning for {progress.seconds:.0f} s"]
        for name, cost in (("best step", progress.incumbent), ("bound", progress.bound)):
            words += [] if cost is None else [f"{name} {format_seconds(cost / 1e9)}"]
        gap = relative_gap(progress.incumbent, progress.bound)
        words += [] if gap is None else [f"gap {format_gap(gap)}"]
        print(f"meshwright: {', '.join(words)}", file=sys.stderr)
