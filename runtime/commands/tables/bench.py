"""A benchmark on the terminal: rows as they are finished, the solve that runs, and the whole table at the end."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from formulations.problem.solution import Progress, relative_gap
from planner.benchmarks import BenchResult, BenchRow, Observer, Suite
from planner.common.units import format_gap
from runtime.commands.tables.progress import ProgressLine, progress_line

if TYPE_CHECKING:
    from planner.papers.claims.claim import ClaimRow

_LINES_AROUND_ROWS = 6
_REFRESHES_PER_SECOND = 4
_WIDTH_WITHOUT_TERMINAL = 220


class LiveRows(Observer):
    """The newest rows that fit on the screen, and a line about the solve that runs.

    Parameters
    ----------
    suite
        The suite that runs.
    height
        Lines of the screen.
    """

    def __init__(self, suite: Suite, height: int) -> None:
        self._suite = suite
        self._most_rows = max(1, height - _LINES_AROUND_ROWS)
        self._rows: list[BenchRow] = []
        self._seen: set[str] = set()
        self._what = "starting"
        self._started = time.monotonic()
        self._latest: Progress | None = None

    def begins(self, instance: str, solver: str) -> None:
        """Point the line at a new solve."""
        self._seen.add(instance)
        self._what, self._started, self._latest = f"{instance}  {solver}", time.monotonic(), None

    def progress(self, progress: Progress) -> None:
        """Take an improvement; drawing happens at the screen's own rate."""
        self._latest = progress

    def row(self, row: BenchRow) -> None:
        """Show a finished row."""
        self._rows.append(row)

    def __rich__(self) -> Group:
        """Draw rows and line."""
        names = {instance.name for instance in self._suite.instances}
        place = f"{len(self._seen & names)}/{len(names)}"
        words = [place, self._what, f"{time.monotonic() - self._started:.1f} s"]
        if self._latest is not None:
            ends = ("incumbent", self._latest.incumbent), ("bound", self._latest.bound)
            words += [f"{name} {value:,}" for name, value in ends if value is not None]
            gap = relative_gap(self._latest.incumbent, self._latest.bound)
            words += [] if gap is None else [f"gap {format_gap(gap)}"]
        table = bench_table(BenchResult(tuple(self._rows)), self._most_rows)
        return Group(*([table] if self._rows else []), Text("  ".join(words), no_wrap=True, overflow="ellipsis"))


class RowLines(Observer):
    """A line on stderr for each finished row."""

    def row(self, row: BenchRow) -> None:
        """Print a finished row."""
        (cells,) = BenchResult((row,)).cells()
        print("  ".join(filter(None, cells)), file=sys.stderr, flush=True)


def bench_table(result: BenchResult, last: int | None = None, whole: bool = False) -> Table:
    """Draw all rows of a result, or the last ones, with a line between instances; all columns, or a paper's."""
    columns = result.columns(whole)
    table = Table(show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column.heading, justify="right" if column.is_number else "left", no_wrap=True)
    first = 0 if last is None else max(0, len(result.rows) - last)
    names = [row.instance for row in result.rows] + [""]
    ends = [here != after for here, after in pairwise(names)]
    for cells, ends_instance in list(zip(result.cells(whole), ends, strict=True))[first:]:
        table.add_row(*cells, end_section=ends_instance and last is None)
    return table


@contextmanager
def live_rows(suite: Suite) -> Iterator[Observer]:
    """Draw a benchmark on stderr while the block runs; where stderr is no terminal, a line for each finished row."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield RowLines()
        return
    display = LiveRows(suite, console.height)
    with Live(display, console=console, transient=True, refresh_per_second=_REFRESHES_PER_SECOND):
        yield display


def print_result(result: BenchResult, whole: bool = False) -> None:
    """Print the table on stdout: as wide as the terminal, or as it needs where there is none."""
    Console(width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL).print(bench_table(result, whole=whole))


class PaperProgress:
    """Tables of papers on stderr: a line for each, and on a terminal the cell that is computed."""

    def __init__(self, line: ProgressLine) -> None:
        self._line = line

    def table(self, paper: str, table: str, number: int, count: int) -> None:
        """Print the table that begins."""
        print(f"{paper}: table {number} of {count}, {table}", file=sys.stderr)

    def kept(self, paper: str, table: str) -> None:
        """Print the table that is there."""
        print(f"{paper}: {table} is there already", file=sys.stderr)

    def step(self, text: str) -> None:
        """Show the cell."""
        self._line.begin(text)


@contextmanager
def paper_progress() -> Iterator[PaperProgress]:
    """Show the progress of tables while the block runs."""
    with progress_line("tables") as line:
        yield PaperProgress(line)


def print_claims(rows: Sequence[ClaimRow]) -> None:
    """Print the table of claims on stdout, then the headlines again, and how many claims hold."""
    from planner.papers.claims.report import HEADINGS, headlines, summary

    console = Console(width=None if sys.stdout.isatty() else _WIDTH_WITHOUT_TERMINAL)
    for title, part in (("claims", rows), ("headlines", headlines(rows))):
        table = Table(*HEADINGS, title=title, show_edge=False, pad_edge=False)
        for row in part:
            table.add_row(*map(Text, row.cells()))
        console.print(table)
    for line in summary(rows):
        print(line)
