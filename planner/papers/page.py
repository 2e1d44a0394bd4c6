"""Pages of results: sections, each made of rows of the tables that a paper's results file has.

A paper's module ``page.py`` lists its ``SECTIONS``. No number stands in them: they choose rows, and say what the rows
mean. A section of which a table is missing is left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from planner.papers.cells import Row

__all__ = ["MISSING", "Rows", "Section", "grid", "losses", "page", "pivot"]

Rows = Mapping[str, Sequence[Row]]
"""Rows of every table, by its name."""

MISSING = "-"
"""Where there is no plan, or nothing was computed."""


@dataclass(frozen=True, slots=True)
class Section:
    """A part of a page.

    Parameters
    ----------
    title
        Its heading.
    tables
        Names of the tables whose rows it uses.
    lines
        Makes its lines of Markdown from the rows.
    also
        Names of tables whose rows it uses where they are there.
    """

    title: str
    tables: tuple[str, ...]
    lines: Callable[[Rows], Iterable[str]]
    also: tuple[str, ...] = ()


def page(paper: str, title: str, sections: Iterable[Section], tables: Mapping[str, Mapping[str, Any]]) -> str:
    """A page in Markdown; every section with its command, machine, date and seconds.

    Parameters
    ----------
    paper, title
        Name in commands, and in the heading.
    sections
        In their order.
    tables
        Of the results file: by name, each with ``rows``, ``date``, ``machine`` and ``seconds``.
    """
    rows: Rows = {name: table["rows"] for name, table in tables.items()}
    lines = [f"# Results: {title}", "", f"Made by `meshwright bench papers` of `{paper}.json`.", ""]
    for section in sections:
        if not rows.keys() >= set(section.tables):
            continue
        names = [*section.tables, *(name for name in section.also if name in rows)]
        used = [tables[name] for name in names]
        machines = dict.fromkeys(table["machine"] for table in used)
        dates = dict.fromkeys(table["date"] for table in used)
        lines += [
            f"## {section.title}",
            "",
            f"- Command: `meshwright bench papers --paper {paper} --part {','.join(names)}`",
            f"- Machine: {'; '.join(machines)}, no GPU",
            f"- Date: {', '.join(dates)}; {sum(table['seconds'] for table in used):.0f} s",
            "",
            *section.lines(rows),
            "",
        ]
    return "\n".join(lines)


def grid(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines of a table: the first column to the left, the others to the right."""
    ruler = "|---|" + "---:|" * (len(header) - 1)
    return [_line(header), ruler, *(_line(row) for row in rows)]


def _line(cells: Iterable[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def pivot(
    rows: Iterable[Row],
    down: str,
    across: str,
    value: str,
    text: Callable[[Any], str],
    corner: str = "",
) -> list[str]:
    """Lines of a table with one row for each value of the column ``down``, and one column for each of ``across``.

    Parameters
    ----------
    rows
        Each with the three columns; of several for one place the last counts.
    down, across, value
        Names of columns.
    text
        Of a value; nothing and None are :data:`MISSING`.
    corner
        Heading of the first column; ``down`` if empty.
    """
    found: dict[Any, dict[Any, Any]] = {}
    columns: dict[Any, None] = {}
    for row in rows:
        found.setdefault(row[down], {})[row[across]] = row[value]
        columns.setdefault(row[across])
    return grid(
        [corner or down, *map(str, columns)],
        (
            [str(name), *(MISSING if (each := cells.get(column)) is None else text(each) for column in columns)]
            for name, cells in found.items()
        ),
    )


def losses(searches: Mapping[str, Sequence[float | None]]) -> list[str]:
    """Lines of a table of what searches lose beside the exact solution of the same problem.

    Parameters
    ----------
    searches
        By name: for each problem that has a plan, the share of the exact objective by which the search is above it, or
        None where it found no plan.
    """
    rows = []
    for name, lost in searches.items():
        found = [each for each in lost if each is not None]
        ends = [_percent(median(found)), _percent(max(found))] if found else [MISSING, MISSING]
        rows.append([name, str(len(lost)), str(len(lost) - len(found)), *ends])
    return grid(["search", "problems", "no plan in its time", "median loss", "worst loss"], rows)


def _percent(share: float) -> str:
    return "0" if share == 0 else f"{100 * share:.2g} %" if share < 0.1 else f"{100 * share:.0f} %"
