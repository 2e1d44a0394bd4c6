"""Results of a benchmark: ratios to the best row of each instance, contradictions between solvers, tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

from formulations.problem.files import write_text_atomically
from formulations.problem.solution import Status
from planner.benchmarks.rows import BenchRow, RowError, row_from_document
from planner.common.units import format_bytes, format_gap

_DASH = "-"
_LATEX = {character: f"\\{character}" for character in "&%$#_{}"} | {
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "\\": "\\textbackslash{}",
    "<": "$<$",
    ">": "$>$",
}


@dataclass(frozen=True, slots=True)
class Ratios:
    """Ratios of a row to the best row of its instance; None where there is nothing to compare.

    Parameters
    ----------
    objective
        Objective over the smallest one of any solver.
    seconds
        Seconds over those of the fastest solver that reached the smallest objective; where no solver has an
        objective, of the fastest that found the instance infeasible. A faster solver with a worse objective is below 1.
    best_known
        Relative distance of the objective from the best known one, negative where it is smaller.
    """

    objective: float | None
    seconds: float | None
    best_known: float | None


@dataclass(frozen=True, slots=True)
class Column:
    """A column of the table, and whether it is one of the few that a paper has."""

    heading: str
    is_number: bool
    cell: Callable[[BenchRow, Ratios], str]
    in_papers: bool = False


@dataclass(frozen=True)
class BenchResult:
    """Rows of one benchmark, shown as a table.

    Parameters
    ----------
    rows
        In the order in which they were finished.
    interrupted
        Whether Ctrl-C ended the benchmark; the last row may then be one that was cut short.
    """

    rows: tuple[BenchRow, ...]
    interrupted: bool = False

    def __repr__(self) -> str:
        instances, solvers = ({getattr(row, name) for row in self.rows} for name in ("instance", "solver"))
        ended = ", interrupted" if self.interrupted else ""
        return f"<benchmark of {len(instances)} instances by {len(solvers)} solvers: {len(self.rows)} rows{ended}>"

    @classmethod
    def load(cls, path: str | Path) -> BenchResult:
        """Read the rows that :meth:`save` or ``meshwright bench --json`` wrote.

        Raises
        ------
        RowError
            The file holds no list of rows.
        OSError
            The file cannot be read.
        """
        try:
            document = json.loads(Path(path).read_bytes())
        except ValueError as error:
            raise RowError(f"{path}: not valid JSON: {error}") from None
        if not isinstance(document, list):
            raise RowError(f"{path}: must be a list of rows")
        return cls(tuple(map(row_from_document, document)))

    def save(self, path: str | Path) -> None:
        """Write the rows as a JSON list, atomically.

        Raises
        ------
        OSError
            The file cannot be written.
        """
        rows = ",\n".join(json.dumps(row.as_document(), ensure_ascii=False) for row in self.rows)
        write_text_atomically(path, f"[\n{rows}\n]\n")

    def ratios(self) -> list[Ratios]:
        """Return the ratios of every row."""
        return [_ratios(row, self._of(row.instance)) for row in self.rows]

    def contradictions(self) -> list[str]:
        """Return contradictions within one row, and between solvers of one instance."""
        found = [f"{row.instance}: {row.contradiction}" for row in self.rows if row.contradiction]
        for instance in dict.fromkeys(row.instance for row in self.rows):
            found += _contradictions_between(self._of(instance))
        return found

    def columns(self, whole: bool = False) -> list[Column]:
        """Return the columns that are not empty: those of a table in a paper, or all of them."""
        empty = {
            "nodes": all(row.nodes is None for row in self.rows),
            **{column.heading: all(row.best_known is None for row in self.rows) for column in BEST_KNOWN_COLUMNS},
        }
        found = [column for column in (*COLUMNS, *BEST_KNOWN_COLUMNS) if not empty.get(column.heading)]
        return [column for column in found if whole or column.in_papers]

    def cells(self, whole: bool = False) -> list[list[str]]:
        """Return the text of every cell, row by row."""
        columns = self.columns(whole)
        return [
            [column.cell(row, ratios) for column in columns]
            for row, ratios in zip(self.rows, self.ratios(), strict=True)
        ]

    def to_markdown(self, whole: bool = False) -> str:
        """Return the table in Markdown, with all columns or those that a paper has."""
        columns = self.columns(whole)
        lines = [
            [column.heading for column in columns],
            ["---:" if column.is_number else "---" for column in columns],
            *self.cells(whole),
        ]
        return "\n".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines)

    def to_latex(self, whole: bool = False) -> str:
        """Return the table in LaTeX, for the package booktabs, with a line between instances; columns as above."""
        columns = self.columns(whole)
        names = [row.instance for row in self.rows]
        ends = ["", *("\\midrule\n" if here != before else "" for before, here in pairwise(names))]
        lines = [
            f"{end}{' & '.join(map(_latex, line))} \\\\" for end, line in zip(ends, self.cells(whole), strict=True)
        ]
        alignment = "".join("r" if column.is_number else "l" for column in columns)
        head = f"{' & '.join(_latex(column.heading) for column in columns)} \\\\"
        body = [f"\\begin{{tabular}}{{{alignment}}}", "\\toprule", head, "\\midrule", *lines]
        return "\n".join([*body, "\\bottomrule", "\\end{tabular}"])

    def save_table(self, path: Path, whole: bool = False) -> None:
        """Write the table, in LaTeX where the path ends in ``.tex`` and in Markdown else, atomically.

        It has all columns, or those that a paper has.

        Raises
        ------
        OSError
            The file cannot be written.
        """
        write_text_atomically(path, (self.to_latex(whole) if path.suffix == ".tex" else self.to_markdown(whole)) + "\n")

    def _repr_html_(self) -> str:
        columns = self.columns(whole=True)
        styles = [f" style='text-align:{'right' if column.is_number else 'left'}'" for column in columns]
        head = "".join(f"<th{style}>{escape(c.heading)}</th>" for c, style in zip(columns, styles, strict=True))
        body = "".join(
            f"<tr>{''.join(f'<td{style}>{escape(cell)}</td>' for cell, style in zip(line, styles, strict=True))}</tr>"
            for line in self.cells(whole=True)
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"

    def _of(self, instance: str) -> list[BenchRow]:
        return [row for row in self.rows if row.instance == instance]


def _ratios(row: BenchRow, rivals: Sequence[BenchRow]) -> Ratios:
    best = min((other.objective for other in rivals if other.objective is not None), default=None)
    winners = [other for other in rivals if other.objective == best and (best is not None or _is_infeasible(other))]
    fastest = min((winner.seconds for winner in winners), default=None)
    return Ratios(
        _ratio(row.objective, best),
        row.seconds / fastest if fastest else None,
        None if (known := _ratio(row.objective, row.best_known)) is None else known - 1,
    )


def _ratio(value: int | None, reference: int | None) -> float | None:
    if value is None or reference is None:
        return None
    if value == reference:
        return 1.0
    return value / reference if reference > 0 else None


def _is_infeasible(row: BenchRow) -> bool:
    return row.status in (Status.INFEASIBLE, Status.INFEASIBLE_UNCONFIRMED)


def _contradictions_between(rows: Sequence[BenchRow]) -> list[str]:
    """Compare the bounds that solvers proved with the checked objectives that others found."""
    solved = [row for row in rows if row.objective is not None]
    if not solved:
        return []
    best = min(solved, key=lambda row: (row.objective is None, row.objective))
    found = []
    for row in rows:
        if row.status is Status.INFEASIBLE:
            found.append(f"{row.instance}: {row.solver} reports infeasible, but {best.solver} found {best.objective}")
        elif row.bound is not None and best.objective is not None and row.bound > best.objective:
            found.append(
                f"{row.instance}: {row.solver} reports the bound {row.bound}, but {best.solver} found {best.objective}"
            )
    return found


def _latex(text: str) -> str:
    """Return text with the characters that LaTeX reads otherwise escaped."""
    return "".join(_LATEX.get(character, character) for character in text)


def _integer(value: int | None) -> str:
    return _DASH if value is None else f"{value:,}"


def _proof(row: BenchRow) -> str:
    known = _DASH if row.proof is None else str(row.proof)
    return known if row.claimed is None else f"{known}; {_integer(row.claimed)} claimed"


def _times(ratio: float | None, digits: int) -> str:
    return _DASH if ratio is None else f"{ratio:.{digits}f}"


COLUMNS = (
    Column("instance", False, lambda row, _: row.instance, True),
    Column("solver", False, lambda row, _: row.solver, True),
    Column("nodes", True, lambda row, _: _integer(row.nodes), True),
    Column("status", False, lambda row, _: "contradiction" if row.contradiction else str(row.status), True),
    Column("objective", True, lambda row, _: _integer(row.objective), True),
    Column("bound", True, lambda row, _: _integer(row.bound), True),
    Column("gap", True, lambda row, _: format_gap(row.gap), True),
    Column("proof", False, lambda row, _: _proof(row)),
    Column("seconds", True, lambda row, _: f"{row.seconds:.3f}", True),
    Column("CPU seconds", True, lambda row, _: f"{row.cpu_seconds:.3f}"),
    Column("peak RSS", True, lambda row, _: format_bytes(row.peak_rss_bytes)),
    Column("objective / best", True, lambda _, ratios: _times(ratios.objective, 4)),
    Column("seconds / best", True, lambda _, ratios: _times(ratios.seconds, 2)),
)
BEST_KNOWN_COLUMNS = (
    Column("best known", True, lambda row, _: _integer(row.best_known)),
    Column("to best known", True, lambda _, r: _DASH if r.best_known is None else f"{100 * r.best_known:+.3f} %", True),
)
