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
from formulations.galvatron.slips import READINGS
from planner.papers.cells import Cell, Row
from planner.papers.galvatron.cases import GIGABYTE, GalvatronCase
from planner.papers.hardware import Hardware

__all__ = ["FIGURE_7", "figure_7_cells", "runs_of"]

SECONDS = 12.0
GAP = Fraction(1, 1000)

_C_HIGH = ("a100-2x8-nvlink", "T5-512/4-32", "PP+SDP+CKPT, PP+SDP, PP+DP")

FIGURE_7 = {
    "A": ("titan-rtx-8-pcie", "BERT-Huge-32", "PP+DP+CKPT and PP+SDP+CKPT", Hardware.PRESET),
    "B": (
        "titan-rtx-8-pcie",
        "Swin-Huge-32",
        "PP+DP, PP+DP+CKPT, PP+TP+DP; DP in early, TP in late layers",
        Hardware.PRESET,
    ),
    "C, low": ("titan-rtx-2x8-pcie", "T5-512/4-32", "PP+DP+TP in the decoder", Hardware.PRESET),
    "C, high": (*_C_HIGH, Hardware.PRESET),
    "C, high, inferred": (*_C_HIGH, Hardware.INFERRED),
}
"""Cluster and model of each case under 8 GB, what the paper says of its plan, and the hardware."""


def figure_7_cells() -> Iterator[Cell]:
    """One cell for every drawn case."""
    for name, (cluster, model, printed, hardware) in FIGURE_7.items():
        case = GalvatronCase(
            cluster, model, 8, "galvatron_bmw", hardware=hardware, any_degree=True, data_with_sharded=False
        )
        yield Cell(f"case {name}", partial(_plans, name, case, printed))


def _plans(name: str, case: GalvatronCase, printed: str) -> Iterator[Row]:
    """The plans of the paper's search, and the exact one, whose search begins with the best of them."""
    problem = case.problem()
    plans: dict[str, PipelinePlan | None] = {}
    for solver, slips in READINGS.items():
        found = case.search(slips, None, SECONDS).best
        plans[solver] = found.plan if found is not None and problem.evaluate(found.plan).fits else None
    start = max(filter(None, plans.values()), key=problem.samples_per_second, default=None)
    plans["exact"] = solve_joint(problem, GAP, start, SECONDS).plan
    for solver, plan in plans.items():
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
