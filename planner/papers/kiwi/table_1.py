"""Cells of KIWI's Table 1 on our perceptron: our formulations, and the paper's own programs in a short time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

from formulations.problem.solution import SolveOptions, higher_bound, relative_gap
from formulations.solvers import DEFAULT_SOLVER
from planner.benchmarks import bench
from planner.benchmarks.suites import BenchInstance, Suite
from planner.papers.cells import Cell, Row
from planner.papers.kiwi.mlp import PUBLISHED, PUBLISHED_FORMULATIONS, kiwi_mlp_suite

__all__ = ["LONG_SECONDS", "PUBLISHED_SECONDS", "own_cells", "published_cells"]

_SECONDS = 60.0

PUBLISHED_SECONDS = {"kiwi_full_published": 20.0, "kiwi_reduced_published": 8.0}
"""Time limits of the paper's own programs: the full one has a first plan after 15 s and no proof after minutes; the
reduced one is claimed optimal after a few seconds."""

LONG_SECONDS = {"kiwi_full_published": 1800.0}
"""A little more than the 1,717 s that the paper's solver had for its hardest limit: two hours for all four."""


def own_cells() -> Iterator[Cell]:
    """The full problem as the solver ``staged``; the others as canonical problems by the portfolio."""
    suite = kiwi_mlp_suite()
    for each in suite.instances:
        if each.formulation not in PUBLISHED_FORMULATIONS:
            own = each.own_solvers if each.formulation == "kiwi_full" else {}
            yield Cell(each.name, partial(_solved, replace(suite, instances=(replace(each, own_solvers=own),))))


def published_cells(seconds: Mapping[str, float] = PUBLISHED_SECONDS) -> Iterator[Cell]:
    """The paper's own programs, until they are claimed optimal and confirmed, or their time ends.

    Parameters
    ----------
    seconds
        Time limits by formulation; those without one are left out.
    """
    suite = kiwi_mlp_suite()
    for each in suite.instances:
        if each.formulation in seconds:
            yield Cell(each.name, partial(_published, suite, each, seconds[each.formulation]))


def _solved(suite: Suite) -> Iterator[Row]:
    """One instance of the perceptron."""
    cost = _unlimited_cost(suite)
    for row in bench(suite, [DEFAULT_SOLVER], time_limit=_SECONDS).rows:
        yield {
            "share": _share(row.instance),
            "formulation": row.formulation,
            "ratio": None if row.objective is None else row.objective / cost,
            "seconds": row.seconds,
            "status": str(row.status),
        }


def _published(suite: Suite, instance: BenchInstance, seconds: float) -> Iterator[Row]:
    """One program; ``claimed_seconds`` is when its solver claims that no plan is better, without the confirmation."""
    options = SolveOptions(seconds)
    found = instance.own_solvers[PUBLISHED](options, lambda _: None, None)
    claimed = (each.seconds for each in found.history if each.claimed == each.incumbent == found.objective is not None)
    gap = relative_gap(found.objective, higher_bound(found.bound, found.claimed))
    yield {
        "share": _share(instance.name),
        "formulation": instance.formulation,
        "ratio": None if found.objective is None else found.objective / _unlimited_cost(suite),
        "claimed_gap_percent": None if gap is None else 100 * gap,
        "claimed_seconds": next(claimed, None),
        "seconds": found.seconds,
        "status": str(found.status),
    }


def _share(name: str) -> int:
    return int(name.rpartition("%")[0].rpartition("-")[2])


def _unlimited_cost(suite: Suite) -> int:
    """Cost of the best plan without a limit, from the suite's note on it."""
    return int(suite.notes[1].partition("costs ")[2].partition(" ")[0].replace(",", ""))
