"""The table *claims* as text: a summary by paper, rows for the terminal, and pages in Markdown."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from importlib import import_module
from pathlib import Path

from formulations.problem.files import write_text_atomically
from planner.papers.claims.claim import ClaimRow, Verdict, printed_claims
from planner.papers.claims.one_model import SECTIONS
from planner.papers.claims.results import PaperResults, paper_claims
from planner.papers.h3t import paper_tables as h3t_paper
from planner.papers.page import page

__all__ = [
    "HEADINGS",
    "HEADLINES",
    "hardware_lines",
    "headlines",
    "markdown",
    "results_page",
    "summary",
    "write_report",
]

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
    machines = [table["machine"] for each in results for table in each.tables.values()]
    return "\n".join(
        [
            "# Claims of the papers beside ours",
            "",
            "- Command: `meshwright bench papers`",
            f"- Machine: {'; '.join(dict.fromkeys(machines)) or 'none'}; no GPU is used",
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
            *hardware_lines(results),
            "## All claims",
            "",
            *_lines(rows),
            "",
        ]
    )


def hardware_lines(results: Sequence[PaperResults]) -> list[str]:
    """Rows under preset and inferred hardware beside the printed ones, of the tables that were run under both."""
    tables = {each.paper: each.rows for each in results}
    lines = []
    h3t = tables.get("h3t", {})
    if {"table_1", "table_1_inferred"} <= h3t.keys():
        lines += [
            "H3T, Table 1, seconds of a step (PCIe of the GeForce cards and computation of eight A100 inferred):",
            "",
        ]
        columns = list(dict.fromkeys(row["column"] for row in h3t["table_1"]))
        lines += [f"| row | hardware | {' | '.join(columns)} |", "|" + "---|" * (2 + len(columns))]
        rows = {"all_on": "all_on", "greedy": "greedy", "exact": "exact, synchronized"}
        rows |= {"exact_free": "exact, free"} if "exact_free" in h3t else {}
        for solver, text in rows.items():
            for table, hardware in (("table_1", "preset"), ("table_1_inferred", "inferred")):
                found = {
                    row["column"]: row["seconds"]
                    for row in (*h3t[table], *h3t.get("exact_free", ()))
                    if (row["solver"], row["hardware"]) == (solver, hardware)
                }
                cells = [_number(found.get(column)) for column in columns]
                lines.append(f"| {text} | {hardware} | {' | '.join(cells)} |")
            if solver in h3t_paper.TABLE_1:
                printed = " | ".join(_number(value) for value in h3t_paper.TABLE_1[solver])
                lines.append(f"| {solver} | printed | {printed} |")
        lines.append("")
    figure = tables.get("galvatron", {}).get("figure_4", ())
    if figure:
        lines += ["Galvatron-BMW, Figure 4, samples per second of printed partitions on four A100:", ""]
        lines += ["| partition | preset | inferred (TF32) | printed |", "|---|---|---|---|"]
        printed_rates = {
            claim.key.split("/")[1]: claim.printed
            for claim in printed_claims("galvatron")
            if claim.key.startswith("figure_4") and claim.key.endswith("throughput")
        }
        for name, rate in printed_rates.items():
            ours = {row["hardware"]: row["rate"] for row in figure if row["partition_name"] == name}
            lines.append(f"| {name} | {_number(ours['preset'])} | {_number(ours['inferred'])} | {_number(rate)} |")
        lines.append("")
    return ["## Preset and inferred hardware", "", *lines] if lines else []


def _number(value: float | None) -> str:
    return "out of memory" if value is None else f"{value:.1f}"


def results_page(results: PaperResults) -> str:
    """The page of one paper's results."""
    module = import_module(f"planner.papers.{results.paper}.page")
    return page(results.paper, module.TITLE, (*module.SECTIONS, *SECTIONS), results.tables)


def write_report(folder: Path, results: Sequence[PaperResults]) -> Path:
    """Write a page for each paper and the page of all claims beside the results.

    Returns
    -------
    Path
        The page of claims.

    Raises
    ------
    OSError
        A page cannot be written.
    """
    for each in results:
        write_text_atomically(folder / f"{each.paper}.md", results_page(each))
    path = folder / "CLAIMS.md"
    write_text_atomically(path, markdown([row for each in results for row in paper_claims(each)], results))
    return path


def _lines(rows: Iterable[ClaimRow]) -> list[str]:
    return [
        f"| {' | '.join(HEADINGS)} |",
        "|" + "---|" * len(HEADINGS),
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in row.cells()) + " |" for row in rows),
    ]
