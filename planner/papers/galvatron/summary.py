"""Summary of the rows of the suite ``galvatron``: rates and times, the paper's order of variants, and losses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from statistics import median

from planner.benchmarks.rows import BenchRow
from planner.papers.galvatron import paper_tables as paper

UNITS_PER_SECOND = 10**10
"""Tenths of a nanosecond."""

ORDER = (
    ("galvatron_dp_tp", "galvatron"),
    ("galvatron_dp_pp", "galvatron"),
    ("galvatron", "galvatron_base"),
    ("galvatron", "galvatron_1f1b_biobj"),
    ("galvatron_base", "galvatron_bmw"),
    ("galvatron_1f1b_biobj", "galvatron_bmw"),
)
"""Pairs of variants of which, by the paper, the second is never slower."""

EXACT_GAP = Fraction(1, 1000)
"""Gap at which the exact search ends."""

EXACT = ("exact", "labels")
"""Solvers that prove their plans: of whole pipelines, and of stages."""


def summary(rows: Sequence[BenchRow]) -> list[str]:
    """Lines that summarize the rows.

    Parameters
    ----------
    rows
        Of one run, or of several together.
    """
    return [*_rates(rows), *_orders(rows), *_losses(rows)]


def _rates(rows: Sequence[BenchRow]) -> Iterator[str]:
    """Samples per second and time of every search."""
    tables = [row for row in rows if row.formulation in paper.VARIANTS]
    for instance in dict.fromkeys(row.instance for row in tables):
        words = [
            f"{row.solver} {'no plan' if row.objective is None else f'{_rate(row):.2f}'} in {row.seconds:.1f} s"
            for row in tables
            if row.instance == instance
        ]
        yield f"{instance}: samples/s {', '.join(words)}"


def _orders(rows: Sequence[BenchRow]) -> Iterator[str]:
    """Number of pairs of variants that each solver orders as the paper does, and the other pairs."""
    by_solver: dict[str, dict[str, BenchRow]] = {}
    for row in rows:
        if row.formulation in paper.VARIANTS:
            by_solver.setdefault(row.solver, {})[row.instance] = row
    for solver, found in by_solver.items():
        pairs = list(_pairs(found))
        broken = [(slower, faster) for slower, faster in pairs if _rate(faster) < _rate(slower) * (1 - EXACT_GAP)]
        if pairs:
            yield f"order of the paper by {solver}: kept by {len(pairs) - len(broken)} of {len(pairs)} pairs"
        for slower, faster in broken:
            rates = f"{slower.instance} {_rate(slower):.2f}, {faster.formulation} {_rate(faster):.2f}"
            yield f"order of the paper broken by {solver}: {rates}"


def _pairs(found: dict[str, BenchRow]) -> Iterator[tuple[BenchRow, BenchRow]]:
    """Pairs of one cell of which the first has a plan."""
    for instance, row in found.items():
        for slower, faster in ORDER:
            other = found.get(instance.removesuffix(slower) + faster)
            if instance.endswith(f"-{slower}") and other is not None and _rate(row):
                yield row, other


def _losses(rows: Sequence[BenchRow]) -> Iterator[str]:
    """Extra time of each search over the exact one, over all instances that have a plan."""
    exact = {row.instance: row for row in rows if row.solver in EXACT and row.objective is not None}
    for formulations, what in ((paper.VARIANTS, "whole pipelines"), (("galvatron_stage",), "single stages")):
        solved = [row for row in rows if row.formulation in formulations and row.instance in exact]
        for solver in dict.fromkeys(row.solver for row in solved if row.solver not in EXACT):
            own = [row for row in solved if row.solver == solver]
            lost = [row.objective / (exact[row.instance].objective or 1) - 1 for row in own if row.objective]
            without = f"no plan on {len(own) - len(lost)} of {len(own)}"
            if lost:
                figures = f"median {100 * median(lost):.2f} %, worst {100 * max(lost):.2f} %"
                yield f"loss of {solver} on {what}: {figures}, {without}"
            else:
                yield f"loss of {solver} on {what}: {without}"


def _rate(row: BenchRow) -> float:
    """Samples per second; 0 without a plan."""
    return UNITS_PER_SECOND / row.objective if row.objective else 0.0
