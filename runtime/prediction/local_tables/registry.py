"""Tables of the papers that are measured on this machine, which ``bench papers`` computes where they are named."""

from __future__ import annotations

from collections.abc import Mapping

from planner.papers.cells import Table

__all__ = ["local_tables"]


def local_tables(paper: str) -> Mapping[str, Table]:
    """A paper's tables of local runs, by name."""
    from planner.papers.claims.one_model import BASELINES, beside_cases  # planners take seconds to import
    from runtime.prediction.local_tables.one_model import one_model_runs

    tables = {"one_model_runs": one_model_runs(paper)}
    if paper in BASELINES:
        tables["baseline_runs"] = one_model_runs(paper, beside_cases)
    if paper == "galvatron":
        from runtime.prediction.local_tables import figure_5

        tables |= figure_5.TABLES
    if paper == "capture":
        from runtime.prediction.local_tables import figure_7

        tables |= figure_7.TABLES
    return tables
