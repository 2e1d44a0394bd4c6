"""Rows of (name, value) as plain text and as HTML for notebooks."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

Rows = Sequence[tuple[str, str]]


def text_table(rows: Rows) -> str:
    """Two aligned columns."""
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def html_table(rows: Rows) -> str:
    """Two columns; names and values are escaped."""
    lines = (
        f"<tr><th style='text-align:left'>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows
    )
    return f"<table>{''.join(lines)}</table>"
