"""Galvatron-BMW's tables with every row: uniform baselines and the paper's variants, solved exactly on one problem.

A row of a table is a strategy, a column a model. All have the same costs, limits, batches, rule of micro-batches and
strategies (without those that Takeaway 3 drops): baselines are :mod:`formulations.galvatron.uniform`, variants those of
:mod:`planner.papers.galvatron.cases`. So a variant that contains a baseline is never slower, and begins its search with
the best one. Beside a variant's exact plan is what its search finds on the same problem: as published, without the two
slips that the paper's text contradicts, as printed, and repaired. The exact search begins with these plans, so that
none of them is better.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any

from formulations.galvatron.joint import JointResult, solve_joint
from formulations.galvatron.pipeline import PipelinePlan, PipelineProblem, balance_degree, renumbered
from formulations.galvatron.published_search import Balance
from formulations.galvatron.slips import READINGS, REPAIRED, Slip
from formulations.galvatron.strategies import decision_trees, pipeline_degrees
from formulations.galvatron.uniform import baselines, solve_uniform
from planner.papers.cells import Cell, Row, Table
from planner.papers.galvatron import paper_tables as paper
from planner.papers.galvatron.cases import BATCHES, GIGABYTE, VARIANT_SPACES, GalvatronCase
from planner.papers.galvatron.comparisons import (
    figure_6_stage_cells,
    restated_cells,
    stage_cells,
    stages_restated_cells,
)
from planner.papers.galvatron.figure_7 import figure_7_cells
from planner.papers.hardware import Hardware, cluster_of

__all__ = ["BASELINES", "HYBRID", "PURE", "TABLES", "cell_rows"]

PURE = ("ddp", "tp", "gpipe", "fsdp")
"""Baselines that the paper calls pure."""

HYBRID = ("3d", "galvatron_dp_tp", "galvatron_dp_pp")
"""Rows that the paper calls hybrid."""

BASELINES = ("ddp", "tp", "gpipe", "1f1b", "fsdp", "3d")

SECONDS, LARGE_SECONDS = 12.0, 12.0
"""Time limits of one exact search: on 8 and 16 devices, and on 64."""

GAP, LARGE_GAP = Fraction(1, 1000), Fraction(1, 100)

LARGE_BATCHES = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 640, 768, 1024, 1536)
"""Batches of 64 devices."""

A100_16, A100_64, TITAN_8, TITAN_16 = "a100-2x8-nvlink", "a100-8x8-nvlink", "titan-rtx-8-pcie", "titan-rtx-2x8-pcie"


def cell_rows(
    case: GalvatronCase,
    variants: Sequence[str],
    seconds: float = SECONDS,
    gap: Fraction = GAP,
) -> Iterator[Row]:
    """Solve all rows of one cell.

    Parameters
    ----------
    case
        The cell; its variant is ignored.
    variants
        Variants beside the baselines.
    seconds, gap
        Of one exact search.
    """
    plans: list[tuple[PipelineProblem, PipelinePlan]] = []
    for name, uniform in baselines(cluster_of(case.cluster).devices).items():
        try:
            problem = case.baseline(uniform)
        except ValueError:
            yield _row(case, name, None, None)  # more stages than layers
            continue
        found = solve_uniform(problem)
        yield _row(case, name, problem, found)
        if found.plan is not None:
            plans.append((problem, found.plan))
    for variant in variants:
        chosen = replace(case, variant=variant)
        problem = chosen.problem()
        starts = [start for each, plan in plans if (start := _expressed(plan, each, problem)) is not None]
        columns: Row = {}
        for name, slips in READINGS.items():
            outcome = chosen.search(slips, None, seconds).best
            plan = None if outcome is None else outcome.plan
            cost = None if plan is None else problem.evaluate(plan)
            fits = cost is not None and cost.fits
            columns[f"{name}_rate"] = problem.samples_per_second(plan) if plan is not None and fits else None
            if cost is not None and not fits:
                columns[f"{name}_needs_gb"] = max(cost.stage_peaks) / GIGABYTE
            starts += [plan] if plan is not None and fits else []
        best = min(starts, key=lambda plan: Fraction(problem.evaluate(plan).cost, plan.batch), default=None)
        found = solve_joint(problem, gap, best, seconds)
        yield _row(case, variant, problem, found) | columns
        if found.plan is not None:
            plans.append((problem, found.plan))


def _expressed(plan: PipelinePlan, before: PipelineProblem, after: PipelineProblem) -> PipelinePlan | None:
    """The plan in another problem; None where that has not its stages or strategies, or it does not fit there."""
    if plan.stages not in after.usable_degrees or plan.batch not in after.batches:
        return None
    try:
        same = renumbered(plan, before, after)
    except ValueError:
        return None
    return same if after.evaluate(same).fits else None


def _row(case: GalvatronCase, strategy: str, problem: PipelineProblem | None, found: JointResult | None) -> Row:
    row: Row = {
        "hardware": str(case.hardware),
        "cluster": case.cluster,
        "memory_gb": case.memory_gb,
        "model": case.model,
        "strategy": strategy,
        "rate": None,
        "batch": None,
        "proven_none": problem is None or (found is not None and found.plan is None and found.bound is None),
    }
    if problem is None or found is None or found.plan is None:
        return row
    plan, cost = found.plan, problem.evaluate(found.plan)
    tables = problem.tables(plan.stages, plan.batch // plan.micro_batches)
    used = dict.fromkeys(str(tables.strategies[choice]) for choice in plan.choices)
    bound = None if not found.bound else float(1 / (found.bound * Fraction(tables.seconds_per_cost or 1.0)))
    return row | {
        "rate": problem.samples_per_second(plan),
        "rate_bound": bound,
        "batch": plan.batch,
        "micro_batches": plan.micro_batches,
        "partition": list(plan.partition),
        "strategies": list(used),
        "peak_gb": max(cost.stage_peaks) / GIGABYTE,
    }


def _table(
    cells: Sequence[tuple[str, paper.Table]],
    models: Sequence[str],
    hardware: Hardware,
    *,
    variants: tuple[str, ...] = paper.VARIANTS,
    batches: tuple[int, ...] = BATCHES,
    seconds: float = SECONDS,
    gap: Fraction = GAP,
) -> Iterator[Cell]:
    for cluster, table in cells:
        for memory_gb in table:
            for model in models:
                case = GalvatronCase(
                    cluster,
                    model,
                    memory_gb,
                    "galvatron_bmw",
                    batches=batches,
                    hardware=hardware,
                    any_degree=True,
                    data_with_sharded=False,
                )
                label = f"{cluster}, {memory_gb} GB, {model}, {hardware}"
                yield Cell(label, partial(cell_rows, case, variants, seconds, gap))


def _table_4(hardware: Hardware) -> Iterator[Cell]:
    for memory_gb in paper.PARTITIONS:
        for model in paper.TABLE_4_MODELS:
            case = GalvatronCase(
                A100_16,
                model,
                memory_gb,
                "galvatron_1f1b_biobj",
                hardware=hardware,
                any_degree=True,
                data_with_sharded=False,
            )
            yield Cell(f"{memory_gb} GB, {model}, {hardware}", partial(_partitions, case))


def _partitions(case: GalvatronCase) -> Iterator[Row]:
    """Balanced partitions by the repaired searches, the whole search with its slips too, and the exact one."""
    problem = case.problem()
    searches: dict[str, tuple[Slip, Balance | None]] = {
        "memory_balanced": (REPAIRED, Balance.MEMORY),
        "time_balanced": (REPAIRED, Balance.TIME),
        "biobjective": (REPAIRED, None),
        "biobjective_published": (READINGS["published"], None),
        "biobjective_printed": (READINGS["printed"], None),
    }
    best: PipelinePlan | None = None
    for name, (slips, balance) in searches.items():
        found = case.search(slips, balance, SECONDS).best
        plan = None if found is None else found.plan
        fits = plan is not None and problem.evaluate(plan).fits
        yield _row(case, name, problem, _as_joint(problem, plan if fits else None))
        if plan is not None and fits:
            best = min(
                (each for each in (best, plan) if each is not None),
                key=lambda each: Fraction(problem.evaluate(each).cost, each.batch),
            )
    yield _row(case, "exact", problem, solve_joint(problem, GAP, best, SECONDS))


def _as_joint(problem: PipelineProblem, plan: PipelinePlan | None) -> JointResult:
    return JointResult(plan, None if plan is None else problem.evaluate(plan).cost, Fraction(0), 0)


FIGURE_4 = {"memory_balanced": (7, 10, 13, 18), "time_balanced": (12, 12, 12, 12), "optimal": (8, 11, 15, 14)}
"""Partitions of the 48 blocks of BERT-Huge-48 among four stages."""

_FIGURE_4_BATCH, _FIGURE_4_MICRO_BATCHES, _FIGURE_4_STAGES = 32, 8, 4


def _figure_4() -> Iterator[Cell]:
    for hardware in Hardware:
        yield Cell(str(hardware), partial(_balances, hardware))


def _balances(hardware: Hardware) -> Iterator[Row]:
    """Balance degrees of the printed partitions by our costs: four stages of one A100 each, pipeline alone.

    The figure names neither the devices of a stage nor their strategies; one device a stage is the least that fits the
    text ("4-way"). Embedding and head are with the first and the last stage.
    """
    case = GalvatronCase(
        "a100-2x8-nvlink", "BERT-Huge-48", 16, "galvatron_1f1b_biobj", batches=(_FIGURE_4_BATCH,), hardware=hardware
    )
    problem = case.baseline(baselines(_FIGURE_4_STAGES)["1f1b"])
    for name, blocks in FIGURE_4.items():
        sizes = (blocks[0] + 1, *blocks[1:-1], blocks[-1] + 1)
        borders = (0, *(sum(sizes[: end + 1]) for end in range(len(sizes))))
        plan = PipelinePlan(_FIGURE_4_BATCH, _FIGURE_4_MICRO_BATCHES, borders, (0,) * problem.layers)
        cost = problem.evaluate(plan)
        yield {
            "hardware": str(hardware),
            "partition_name": name,
            "partition": list(blocks),
            "alpha_t": balance_degree(cost.stage_costs),
            "alpha_m": balance_degree(cost.stage_peaks),
            "rate": _FIGURE_4_BATCH / (cost.cost * 1e-7),
            "peak_gb": max(cost.stage_peaks) / GIGABYTE,
            "fits": cost.fits,
        }


_FIGURE_6_BLOCKS = (8, 16, 32, 64, 128)
_FIGURE_6_DEVICES = {8: "a100-8-nvlink", 16: A100_16, 64: A100_64}


def _figure_6() -> Iterator[Cell]:
    sizes: list[tuple[str, int, int, str]] = [
        *((TITAN_8, 16, blocks, "galvatron_bmw") for blocks in _FIGURE_6_BLOCKS),
        *((TITAN_8, memory_gb, 48, "galvatron_bmw") for memory_gb in (8, 12, 16, 20)),
        *((cluster, 16, 48, "galvatron_bmw") for cluster in _FIGURE_6_DEVICES.values()),
    ]
    for number, (cluster, memory_gb, blocks, variant) in enumerate(sizes):
        batches = (64, 128, 256)
        case = GalvatronCase(cluster, "BERT-Huge-48", memory_gb, variant, batches=batches, blocks=blocks)
        label = f"{cluster}, {memory_gb} GB, {blocks} blocks, {number + 1} of {len(sizes)}"
        yield Cell(label, partial(_search_seconds, case, blocks))


def _search_seconds(case: GalvatronCase, blocks: int) -> Iterator[Row]:
    """Seconds of the repaired search over blocks, budgets and devices."""
    case.problem()
    started = time.perf_counter()
    found = case.search(REPAIRED, None, SECONDS)
    yield {
        "cluster": case.cluster,
        "devices": cluster_of(case.cluster).devices,
        "memory_gb": case.memory_gb,
        "blocks": blocks,
        "seconds": time.perf_counter() - started,
        "ended": found.ended,
    }


def _table_5(hardware: Hardware) -> Iterator[Cell]:
    """Large models on 64 A100."""
    return _table(
        [(A100_64, paper.TABLE_5)],
        paper.TABLE_5_MODELS,
        hardware,
        batches=LARGE_BATCHES,
        seconds=LARGE_SECONDS,
        gap=LARGE_GAP,
    )


def _strategies() -> Iterator[Row]:
    """Number of strategies on eight devices, summed over the numbers of stages."""
    degrees = pipeline_degrees(8)

    def count(devices: int, **space: Any) -> int:
        return len(decision_trees(devices, **space))

    for stages in degrees:
        yield {
            "group": 8 // stages,
            "raw": count(8 // stages, data_with_sharded=True, checkpoint=False),
            "pruned": count(8 // stages, checkpoint=False),
        }
    for variant in paper.VARIANTS:
        space = VARIANT_SPACES[variant].space
        total = sum(
            count(8 // stages, dimensions=space.dimensions, checkpoint=space.checkpoint)
            for stages in (degrees if space.pipeline else (1,))
        )
        yield {"variant": variant, "count": total}


TABLES: Mapping[str, Table] = {
    "strategies": Table(lambda: [Cell("all", _strategies)]),
    "figure_4": Table(_figure_4),
    "figure_7": Table(figure_7_cells),
    "stages": Table(stage_cells, frozenset({"proven", "exact_seconds"})),
    "stages_restated": Table(
        stages_restated_cells, frozenset({"exact_seconds", "seconds", "proven", "gap"}), named_only=True
    ),
    "restated": Table(
        restated_cells, frozenset({"joint_seconds", "cpsat_seconds", "cpsat_quanta", "cpsat_gap"}), named_only=True
    ),
    "table_2": Table(partial(_table, [(TITAN_8, paper.TABLE_2)], paper.TABLE_2_MODELS, Hardware.PRESET)),
    "table_3": Table(
        partial(
            _table,
            [(TITAN_16, paper.TABLE_3_TITAN), (A100_16, paper.TABLE_3_A100)],
            paper.TABLE_3_MODELS,
            Hardware.PRESET,
        )
    ),
    "table_3_inferred": Table(
        partial(_table, [(A100_16, paper.TABLE_3_A100)], paper.TABLE_3_MODELS, Hardware.INFERRED)
    ),
    "table_4": Table(partial(_table_4, Hardware.PRESET)),
    "table_4_inferred": Table(partial(_table_4, Hardware.INFERRED)),
    "table_5": Table(partial(_table_5, Hardware.PRESET), named_only=True),
    "table_5_inferred": Table(partial(_table_5, Hardware.INFERRED)),
    "figure_6": Table(_figure_6, frozenset({"seconds"})),
    "figure_6_stages": Table(figure_6_stage_cells, frozenset({"seconds"})),
}
"""Tables by name: minutes for Tables II, III and V, seconds for the others."""
