"""The table *claims* as text: a summary by paper, rows for the terminal, and a page in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from formulations.problem.files import write_text_atomically
from planner.papers.claims.claim import ClaimRow, Verdict
from planner.papers.claims.results import PaperResults

__all__ = ["HEADINGS", "HEADLINES", "headlines", "markdown", "summary", "write_report"]

HEADINGS = ("paper", "claim", "printed", "ours", "verdict", "reason")

HEADLINES = {
    "kiwi": ("headline/*", "feasibility_floor_gb/*/*"),
    "osdp": (
        "headline_up_to_factor",
        "figure_5_8gpu_pure_speedup_pct/*",
        "figure_6_16gpu_vs_fsdp_pct/*",
        "hybrid_pct/*",
    ),
    "galvatron": ("headline_speedup_pct/*", "table_3/scaling_claim/factor"),
    "h3t": ("headline/*",),
    "capture": ("headline_peak_reduction_up_to_pct", "smaller_setup_factor_more_than"),
}
"""Patterns of the claims of each paper's abstract and main figures."""


def summary(rows: Sequence[ClaimRow]) -> list[str]:
    """One line for each paper: how many claims hold, differ, and are not reproduced."""
    lines = []
    for paper in dict.fromkeys(row.claim.paper for row in rows):
        counts = Counter(row.answer.verdict for row in rows if row.claim.paper == paper)
        total = sum(counts.values())
        lines.append(
            f"{paper}: {total} claims, " + ", ".join(f"{counts[verdict]} {verdict.value}" for verdict in Verdict)
        )
    return lines


def headlines(rows: Iterable[ClaimRow]) -> list[ClaimRow]:
    """Rows of the papers' headlines."""
    return [row for row in rows if any(fnmatchcase(row.claim.key, pattern) for pattern in HEADLINES[row.claim.paper])]


def markdown(rows: Sequence[ClaimRow], results: Sequence[PaperResults]) -> str:
    """The page of claims: command, dates, summary, headlines, all rows."""
    tables = [
        f"- {each.paper}: "
        + (
            ", ".join(f"`{name}` {table['date']}, {table['seconds']:g} s" for name, table in each.tables.items())
            or "nothing run"
        )
        for each in results
    ]
    return "\n".join(
        [
            "# Claims of the papers beside ours",
            "",
            "- Command: `meshwright bench papers`",
            "- Tables, when they were computed, and for how long:",
            *(f"  {line}" for line in tables),
            "",
            "A number holds within 10 % of the printed one, a row of a table where memory and every cell do.",
            "A statement holds where it is true of our results. Rates and times of the papers were measured,",
            "ours are predicted.",
            "",
            *(f"- {line}" for line in summary(rows)),
            "",
            "## Headlines",
            "",
            *_lines(headlines(rows)),
            "",
            "## All claims",
            "",
            *_lines(rows),
            "",
        ]
    )


def write_report(folder: Path, page: str) -> Path:
    """Write the page of claims beside the results.

    Raises
    ------
    OSError
        It cannot be written.
    """
    path = folder / "CLAIMS.md"
    write_text_atomically(path, page)
    return path


def _lines(rows: Iterable[ClaimRow]) -> list[str]:
    return [
        f"| {' | '.join(HEADINGS)} |",
        "|" + "---|" * len(HEADINGS),
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in row.cells()) + " |" for row in rows),
    ]
