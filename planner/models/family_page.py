"""The page of the families of transformers: written after each family, and gone on with where a call ended."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from formulations.problem.files import write_text_atomically
from formulations.problem.time_limit import noticing_interrupts
from planner.models.families import FamilyRow, families_table, family_rows


def kept_rows(
    names: Sequence[str], page: Path | None, begins: Callable[[str], None], known: Callable[[str], None]
) -> Iterator[FamilyRow]:
    """Yield rows of families; with a page, it and the rows beside it are written after each that is made.

    Parameters
    ----------
    names
        Families, in the order of the table.
    page
        File in Markdown; its rows are in the file of the same name that ends in ``.json``. Those of the same versions
        of torch and transformers are not made again, defects apart.
    begins
        Called with each family that begins.
    known
        Called with a text where rows are taken from the file.

    Raises
    ------
    KeyboardInterrupt
        After Ctrl-C; the family whose search it ended has no row.
    """
    file = None if page is None else page.with_suffix(".json")
    found = {} if file is None else {name: row for name, row in _read(file).items() if name in names}
    if found:
        known(f"{len(found)} of {len(names)} families are known from {file}")
    for name in names:
        if name not in found:
            with noticing_interrupts() as noticed:  # a search that it ends returns its best without an error
                made = {row.family: row for row in family_rows([name], begins)}
            if noticed.is_set():
                raise KeyboardInterrupt
            found |= made
            if page is not None and file is not None:
                _write(page, file, [found[each] for each in names if each in found])
        yield found[name]
    if page is not None and file is not None:
        _write(page, file, [found[name] for name in names])


def page_of(rows: Sequence[FamilyRow]) -> str:
    """The page in Markdown: how it was made, and the table."""
    outcomes = {name: sum(row.outcome == name for row in rows) for name in ("planned", "refused", "defect")}
    counted = ", ".join(f"{count} {name}" for name, count in outcomes.items() if count)
    versions = " and ".join(f"{name} {found}" for name, found in _versions().items())
    minutes = sum(row.seconds for row in rows) / 60
    return f"""# Families of transformers

`meshwright doctor --families --out FILE.md` plans a small model of each and writes this page: layouts, two ranks of the
preset `a100-8-nvlink`, float32, dropout 0. On {datetime.now(UTC):%Y-%m-%d} with {versions}: of {len(rows)} families
{counted}, in {minutes:.0f} minutes. A refusal names the operator and a workaround.

The last column has the operators without a sharding rule, which run replicated, or the reason of a refusal.

{families_table(rows)}
"""


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "transformers")}


def _write(page: Path, file: Path, rows: Sequence[FamilyRow]) -> None:
    write_text_atomically(page, page_of(rows))
    document = {"versions": _versions(), "rows": [asdict(row) for row in rows]}
    write_text_atomically(file, json.dumps(document, indent=1) + "\n")


def _read(file: Path) -> dict[str, FamilyRow]:
    """Rows by family; none where the file is not there, is no such file, or is of other versions."""
    try:
        document: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if document["versions"] != _versions():
            return {}
        rows = [FamilyRow(**row | {"without_rule": tuple(row["without_rule"])}) for row in document["rows"]]
    except (OSError, ValueError, TypeError, KeyError):
        return {}
    return {row.family: row for row in rows if row.outcome != "defect"}
