"""Results files: the tables of one paper, computed one after another and kept, so that a run can be resumed.

A file is one JSON object. A table that is in it is not computed again; delete the file, or give another folder, to
compute it anew. It is written after every table, atomically, and within long tables after some cells: those are in
``begun``, and the next run goes on behind them. Those of the last whole run are in ``results/``: pages,
notebooks and tests read them there (:func:`kept_results`).
"""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from formulations.problem.files import write_text_atomically
from planner.papers.cells import Row, Table
from planner.papers.claims.claim import PAPERS, ClaimRow, Results, claim_rows

__all__ = [
    "KEPT_RESULTS",
    "Observer",
    "PaperResults",
    "ResultsError",
    "kept_results",
    "load_results",
    "paper_claims",
    "run_paper",
    "tables_of",
]

FORMAT = 2

SAVE_SECONDS = 20.0
"""Least time between two writes within a table."""

KEPT_RESULTS = Path(__file__).parent / "results"
"""Folder of the results that the pages and notebooks show."""


class ResultsError(ValueError):
    """A results file that cannot be used; the message names it and the remedy."""


class Observer(Protocol):
    """Callbacks of a run."""

    def table(self, paper: str, table: str, number: int, count: int) -> None:
        """Called before a table is computed."""

    def kept(self, paper: str, table: str) -> None:
        """Called for a table that the file has already."""

    def step(self, text: str) -> None:
        """Called before each cell of a table."""


@dataclass(frozen=True, slots=True)
class PaperResults:
    """Tables of one paper.

    Parameters
    ----------
    paper
        One of :data:`planner.papers.claims.claim.PAPERS`.
    tables
        By name, each with ``rows``, ``date``, ``machine``, ``seconds``, and ``cells``: label, number of rows and
        seconds of each.
    begun
        Tables of which some cells are computed, alike.
    """

    paper: str
    tables: dict[str, dict[str, Any]] = field(default_factory=dict)
    begun: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def rows(self) -> Results:
        """Rows of every table."""
        return {name: table["rows"] for name, table in self.tables.items()}

    def save(self, path: Path) -> None:
        """Write the file.

        Raises
        ------
        OSError
            It cannot be written.
        """
        head = json.dumps({"format": FORMAT, "paper": self.paper})
        # One line a row: a run changes the lines of what it changed.
        begun = f', "begun": {_tables(self.begun)}' if self.begun else ""
        write_text_atomically(path, f'{head[:-1]}, "tables": {_tables(self.tables)}{begun}}}\n')


def _tables(tables: Mapping[str, Mapping[str, Any]]) -> str:
    text = ",\n".join(f"  {json.dumps(name)}: {_lines(table)}" for name, table in tables.items())
    return f"{{\n{text}\n}}"


def _lines(table: Mapping[str, Any]) -> str:
    parts = []
    for key, value in table.items():
        text = json.dumps(value, ensure_ascii=False)
        if isinstance(value, list) and value:
            text = "[\n" + ",\n".join(f"    {json.dumps(each, ensure_ascii=False)}" for each in value) + "\n   ]"
        parts.append(f"   {json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n  }"


def kept_results(paper: str) -> PaperResults:
    """Results of the last whole run.

    Raises
    ------
    ResultsError
        The file is no results file of this paper.
    """
    return load_results(KEPT_RESULTS / f"{paper}.json", paper)


def load_results(path: Path, paper: str) -> PaperResults:
    """Read a results file, or begin one where there is none.

    Raises
    ------
    ResultsError
        The file is no results file of this paper.
    """
    if not path.exists():
        return PaperResults(paper)
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise ResultsError(f"results file {path} cannot be read ({error}); delete it, or use another folder") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT or document.get("paper") != paper:
        raise ResultsError(
            f"results file {path} is not one of format {FORMAT} of the paper {paper}; delete it, or use another folder"
        )
    tables: Any = document.get("tables")
    begun: Any = document.get("begun", {})
    if not _have_rows(tables) or not _have_rows(begun):
        raise ResultsError(f"results file {path} has tables without rows; delete it, or use another folder")
    return PaperResults(paper, tables, begun)


def _have_rows(tables: Any) -> bool:
    return isinstance(tables, dict) and all(isinstance(each, dict) and "rows" in each for each in tables.values())


def tables_of(paper: str) -> Mapping[str, Table]:
    """A paper's tables, by name: the tables of its package, and :mod:`planner.papers.claims.one_model`.

    Raises
    ------
    ResultsError
        There is no such paper.
    """
    if paper not in PAPERS:
        raise ResultsError(f"paper {paper!r} is not known; use {', '.join(PAPERS)}")
    from planner.papers.claims.one_model import one_model  # planners take seconds to import

    own: Mapping[str, Table] = import_module(f"planner.papers.{paper}.tables").TABLES
    return {**own, "one_model": one_model(paper)}


def run_paper(
    paper: str,
    folder: Path,
    observer: Observer,
    tables: Sequence[str] | None = None,
    named: Mapping[str, Table] | None = None,
) -> PaperResults:
    """Compute the tables of a paper that its file in the folder does not have.

    Parameters
    ----------
    paper
        Which.
    folder
        Where ``PAPER.json`` is, or will be.
    observer
        Callbacks.
    tables
        Names of tables; if None, those of :func:`tables_of` that are not computed only where they are named.
    named
        Further tables, which are computed only where they are named.

    Raises
    ------
    ResultsError
        There is no such paper or table, or the file is no results file.
    OSError
        The file cannot be written.
    """
    makers = {**tables_of(paper), **(named or {})}
    unknown = [name for name in tables or () if name not in makers]
    if unknown:
        raise ResultsError(f"paper {paper} has no table {unknown[0]!r}; use {', '.join(makers)}")
    path = folder / f"{paper}.json"
    results = load_results(path, paper)
    usual = [name for name, table in tables_of(paper).items() if not table.named_only]
    chosen = usual if tables is None else list(tables)
    for number, name in enumerate(chosen, start=1):
        if name in results.tables:
            observer.kept(paper, name)
            continue
        observer.table(paper, name, number, len(chosen))
        saved = time.monotonic()
        try:
            for part in _parts(makers[name], observer, results.begun.get(name)):
                results.begun[name] = part
                if time.monotonic() - saved >= SAVE_SECONDS:
                    results.save(path)
                    saved = time.monotonic()
        except BaseException:
            if name in results.begun:
                results.save(path)
            raise
        results.tables[name] = results.begun.pop(name)
        results.save(path)
    return results


def _parts(table: Table, observer: Observer, begun: Mapping[str, Any] | None) -> Iterator[dict[str, Any]]:
    """The table after each of its cells; those that were computed before are not computed again."""
    made = list(table.cells())
    cells: list[list[Any]] = [] if begun is None else list(begun["cells"])
    rows: list[Row] = [] if begun is None else list(begun["rows"])
    if begun is None or [label for label, *_ in cells] != [cell.label for cell in made[: len(cells)]]:
        cells, rows, before = [], [], 0.0
    else:
        before = begun["seconds"]
    started = time.perf_counter()
    for number, cell in enumerate(made[len(cells) :], start=len(cells) + 1):
        observer.step(f"{cell.label} ({number} of {len(made)})")
        begins, count = time.perf_counter(), len(rows)
        rows += json.loads(json.dumps(list(cell.rows())))
        cells.append([cell.label, len(rows) - count, round(time.perf_counter() - begins, 1)])
        yield {
            "date": datetime.now(UTC).date().isoformat(),
            "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
            "seconds": round(before + time.perf_counter() - started, 1),
            "cells": cells,
            "rows": rows,
        }


def paper_claims(results: PaperResults) -> list[ClaimRow]:
    """Rows of the table *claims* of one paper."""
    rules = import_module(f"planner.papers.claims.{results.paper}").RULES
    return claim_rows(results.paper, rules, results.rows)
