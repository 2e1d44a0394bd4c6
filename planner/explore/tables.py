"""Results as tables: short text, HTML for notebooks, pandas, JSON files."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formulations.problem.files import write_text_atomically
from planner.common.units import format_bytes, format_seconds
from planner.explore.errors import ExploreError
from planner.layers.plan.document import LayerPlan
from planner.plan.document import Plan

if TYPE_CHECKING:
    import pandas as pd

AnyPlan = Plan | LayerPlan
"""A plan of operators or of layers."""

_OF_ONE_KIND = ("recomputed", "collectives", "offloaded_bytes", "stages", "micro_batches")
"""Columns that plans of one kind have."""

Row = Mapping[str, Any]
"""Plain values by column; a column that ends in ``seconds`` or ``bytes`` has that unit."""

_MOST_LINES = 12


class Table(ABC):
    """A result with rows; what is shown is a title, the rows and notes."""

    @abstractmethod
    def title(self) -> str:
        """One line that says what it is."""

    @abstractmethod
    def rows(self) -> list[dict[str, Any]]:
        """Rows with the same columns: numbers, strings, truth values and None."""

    def notes(self) -> Sequence[str]:
        """Lines below the rows."""
        return ()

    def to_pandas(self) -> pd.DataFrame:
        """The rows as a data frame; needs pandas, which the extra ``notebooks`` installs."""
        import pandas as pd

        return pd.DataFrame(self.rows())

    def save(self, path: str | Path) -> None:
        """Write title, rows and notes as JSON, atomically.

        Raises
        ------
        ExploreError
            The file cannot be written.
        """
        content = {"title": self.title(), "rows": self.rows(), "notes": list(self.notes())}
        try:
            write_text_atomically(path, json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
        except OSError as error:
            raise ExploreError(f"table {path} cannot be written: {error.strerror or error}") from error

    def __repr__(self) -> str:
        lines = [self.title(), *_aligned(self.rows()), *self.notes()]
        more = len(lines) - _MOST_LINES
        return "\n".join(lines if more <= 0 else [*lines[:_MOST_LINES], f"... {more} more lines: print(...)"])

    def __str__(self) -> str:
        return "\n".join([self.title(), *_aligned(self.rows()), *self.notes()])

    def _repr_html_(self) -> str:
        rows = self.rows()
        names = list(rows[0]) if rows else []
        head = "".join(f"<th>{escape(_heading(name))}</th>" for name in names)
        body = "".join(
            f"<tr>{''.join(f'<td>{escape(shown(name, row[name]))}</td>' for name in names)}</tr>" for row in rows
        )
        notes = "".join(f"<p>{escape(note)}</p>" for note in self.notes())
        return f"<p><b>{escape(self.title())}</b></p><table><tr>{head}</tr>{body}</table>{notes}"


def shown(name: str, value: Any) -> str:
    """A value of a column as text."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if name.endswith("seconds") and isinstance(value, int | float):
        return format_seconds(value) if value >= 0 else f"-{format_seconds(-value)}"
    if name.endswith("bytes") and isinstance(value, int | float):
        return format_bytes(int(value)) if value >= 0 else f"-{format_bytes(int(-value))}"
    if name == "gap":
        return f"{value:.2%}"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def plan_row(name: str, plan: AnyPlan) -> dict[str, Any]:
    """Figures of a plan as a row; None in columns that plans of its kind do not have."""
    figures: dict[str, Any]
    if isinstance(plan, LayerPlan):
        figures = {"stages": len(plan.stages), "micro_batches": plan.micro_batches}
    else:
        offloaded = plan.decision.predicted.host.offloaded_bytes
        figures = {"recomputed": plan.recomputed, "collectives": plan.collectives, "offloaded_bytes": offloaded}
    common = {
        "name": name,
        "seconds": plan.objective_seconds,
        "bound_seconds": plan.bound_seconds,
        "gap": plan.gap,
        "peak_bytes": plan.peak_bytes or None,
    }
    return common | {name: figures.get(name) for name in _OF_ONE_KIND}


def seconds_of(plan: AnyPlan) -> float:
    """Predicted seconds of a step of a plan that was planned.

    Raises
    ------
    ExploreError
        It is a plan of layers that was written by hand.
    """
    if plan.objective_seconds is None:
        raise ExploreError(f"{plan!r} has no prediction: plan it first")
    return plan.objective_seconds


def without_unused(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of plans without the columns that no plan of theirs has, and without bytes where nothing is offloaded."""
    unused = {name for name in _OF_ONE_KIND if all(row[name] is None for row in rows)}
    unused |= {"offloaded_bytes"} if not any(row["offloaded_bytes"] for row in rows) else set()
    return [{name: value for name, value in row.items() if name not in unused} for row in rows]


def signed_seconds(seconds: float) -> str:
    """Seconds with a sign."""
    return f"{'-' if seconds < 0 else '+'}{format_seconds(abs(seconds))}"


def signed_bytes(count: int) -> str:
    """Bytes with a sign."""
    return f"{'-' if count < 0 else '+'}{format_bytes(abs(count))}"


def _heading(name: str) -> str:
    """A column's name as text, without the unit that its values show."""
    return name.removesuffix("_seconds").removesuffix("_bytes").replace("_", " ")


def _aligned(rows: Sequence[Row]) -> list[str]:
    if not rows:
        return []
    names = list(rows[0])
    cells = [[_heading(name) for name in names], *([shown(name, row[name]) for name in names] for row in rows)]
    widths = [max(len(line[k]) for line in cells) for k in range(len(names))]
    return ["  ".join(f"{cell:<{width}}" for cell, width in zip(line, widths, strict=True)).rstrip() for line in cells]
