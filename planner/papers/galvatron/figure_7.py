"""Figure 7: our plans of the cells whose plans the paper draws, as runs of layers with one strategy.

The paper prints no numbers of layers there, only which strategies its plans have; those are in ``paper``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from functools import partial
from itertools import groupby, pairwise

from formulations.galvatron.joint import solve_joint
from formulations.galvatron.pipeline import PipelinePlan, PipelineProblem
from formulations.galvatron.slips import AS_PUBLISHED
from planner.papers.cells import Cell, Row
from planner.papers.galvatron.cases import GIGABYTE, GalvatronCase

__all__ = ["FIGURE_7", "figure_7_cells", "runs_of"]

SECONDS = 12.0
GAP = Fraction(1, 1000)

FIGURE_7 = {
    "A": ("titan-rtx-8-pcie", "BERT-Huge-32", "PP+DP+CKPT and PP+SDP+CKPT"),
    "B": ("titan-rtx-8-pcie", "Swin-Huge-32", "PP+DP, PP+DP+CKPT, PP+TP+DP; DP in early, TP in late layers"),
    "C, low": ("titan-rtx-2x8-pcie", "T5-512/4-32", "PP+DP+TP in the decoder"),
    "C, high": ("a100-2x8-nvlink", "T5-512/4-32", "PP+SDP+CKPT, PP+SDP, PP+DP"),
}
"""Cluster and model of each case under 8 GB, and what the paper says of its plan."""


def figure_7_cells() -> Iterator[Cell]:
    """One cell for every drawn case."""
    for name, (cluster, model, printed) in FIGURE_7.items():
        case = GalvatronCase(cluster, model, 8, "galvatron_bmw", any_degree=True, data_with_sharded=False)
        yield Cell(f"case {name}", partial(_plans, name, case, printed))


def _plans(name: str, case: GalvatronCase, printed: str) -> Iterator[Row]:
    """The published plan, and the exact one, whose search begins with it."""
    problem = case.problem()
    found = case.search(AS_PUBLISHED, None, SECONDS).best
    published = found.plan if found is not None and problem.evaluate(found.plan).fits else None
    exact = solve_joint(problem, GAP, published, SECONDS).plan
    for solver, plan in (("published", published), ("exact", exact)):
        row: Row = {"case": name, "cluster": case.cluster, "model": case.model, "memory_gb": case.memory_gb}
        row |= {"paper": printed, "solver": solver, "rate": None, "runs": None}
        if plan is not None:
            row |= {
                "rate": problem.samples_per_second(plan),
                "batch": plan.batch,
                "micro_batches": plan.micro_batches,
                "stage_peaks_gb": [peak / GIGABYTE for peak in problem.evaluate(plan).stage_peaks],
                "runs": runs_of(problem, plan),
            }
        yield row


def runs_of(problem: PipelineProblem, plan: PipelinePlan) -> list[list[tuple[int, str]]]:
    """Runs of neighbouring layers with one strategy: per stage, numbers of layers and strategies.

    Parameters
    ----------
    problem, plan
        A problem and a plan of it.
    """
    strategies = problem.tables(plan.stages, plan.batch // plan.micro_batches).strategies
    return [
        _runs([str(strategies[choice]) for choice in plan.choices[slice(*pair)]]) for pair in pairwise(plan.borders)
    ]


def _runs(strategies: Sequence[str]) -> list[tuple[int, str]]:
    return [(len(list(alike)), strategy) for strategy, alike in groupby(strategies)]
