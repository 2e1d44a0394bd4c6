"""The headline of the paper's abstract on our rows: how many times as long a baseline's step takes as KIWI's."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from planner.papers.cells import Row
from planner.papers.printed import printed

__all__ = ["COMPARED", "FIGURE_5", "PRINTED", "factors", "largest", "least_memory"]

_NAMES = {
    "sharding": "alpa",
    "checkpoint_dots": "alpa_checkpoint_dots",
    "megatron_selective": "alpa_megatron_selective",
}
PRINTED = {ours: float(printed("kiwi")["headline"][f"up_to_factor_vs_{theirs}"]) for ours, theirs in _NAMES.items()}
"""Largest factors that the abstract prints for Alpa, and for Alpa with both heuristics."""

FIGURE_5 = ("figure_5_encoder", "figure_5_decoder", "sequence_lengths")
"""Tables for Figure 5, which has the paper's maxima, with the sequence and the optimizer that the paper leaves open."""

COMPARED = (*FIGURE_5, "figure_6")
"""Those, and the one with slower links."""

_KIWI = "kiwi_chain"
_PLACE = ("model", "mesh", "sequence", "optimizer", "slowdown", "share")
_USUAL = {"sequence": 1024, "optimizer": "adamw", "slowdown": 1}


def factors(rows: Mapping[str, Sequence[Mapping[str, Any]]], *tables: str) -> list[Row]:
    """One row for each baseline and place where it and KIWI have a plan within the same limit.

    Parameters
    ----------
    rows
        Rows of every table, by its name.
    tables
        Those that are compared, of :data:`COMPARED`; all if none is named.
    """
    found: list[Row] = []
    for table in tables or COMPARED:
        costs: dict[tuple[Any, ...], dict[str, int]] = {}
        for row in rows[table]:
            if row["share"] is not None and row["cost"] is not None:
                place = tuple(row.get(name, _USUAL.get(name)) for name in _PLACE)
                costs.setdefault(place, {})[row["formulation"]] = row["cost"]
        for place, by_name in costs.items():
            found += _compared(dict(zip(_PLACE, place, strict=True)), by_name)
    return found


def _compared(place: Row, costs: dict[str, int]) -> Iterator[Row]:
    for name in PRINTED:
        if {name, _KIWI} <= costs.keys():
            yield {**place, "formulation": name, "factor": costs[name] / costs[_KIWI]}


def largest(found: list[Row], formulation: str) -> Row | None:
    """The row of a baseline's largest factor, None where there is none."""
    rows = [row for row in found if row["formulation"] == formulation]
    return max(rows, key=lambda row: float(row["factor"]), default=None)


def least_memory(rows: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], float]:
    """Least memory (GB) in which a plan was found: a peak made small, or a limit that a plan keeps.

    Parameters
    ----------
    rows
        Of one model in Figure 5.

    Returns
    -------
    dict
        GB by mesh and formulation, of those that have a plan.
    """
    found: dict[tuple[str, str], float] = {}
    for row in rows:
        held = row["peak_gb"] if row["share"] is None else row["limit_gb"] if row["cost"] is not None else None
        if held is not None:
            place = row["mesh"], row["formulation"]
            found[place] = min(held, found.get(place, held))
    return found
