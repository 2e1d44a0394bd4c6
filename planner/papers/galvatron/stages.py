"""The part ``stages`` of the suite ``galvatron``: whole models of Table II as one stage on eight devices.

Its own solvers are Algorithm 3 as printed, as published and repaired (with 32 MB of granularity), and the exact labels,
which begin with the best of these.
On BERT-Huge-48 any solver of canonical problems may run beside them. All have the same strategies and costs, so what
Algorithm 3 loses here is due to its table and its search over budgets alone. The micro-batch is the smallest whose
activations fill the memory of all devices, so that some layers have to be checkpointed. Objective and bound are quanta
of a micro-batch with synchronisation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial

from formulations.galvatron.dynamic_program import search_stage
from formulations.galvatron.labels import StageResult, solve_stage
from formulations.galvatron.slips import AS_PRINTED, AS_PUBLISHED, REPAIRED, Slip
from formulations.galvatron.stage import StageProblem, build_galvatron_stage
from formulations.problem.solution import Progress, SolveOptions, SolveResult, Status, relative_gap
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers import SolverPool
from planner.benchmarks.metering import Meter
from planner.benchmarks.suites import BenchInstance, OwnSolver, ReportProgress
from planner.papers.galvatron import paper_tables as paper
from planner.papers.galvatron.cases import GIGABYTE, GalvatronCase, paper_chain

__all__ = ["SEARCHES", "algorithm_3", "exact_labels", "stage_instances", "the_stage"]

SECONDS = 10.0
CLUSTER, DEVICES = "titan-rtx-8-pcie", 8
CANONICAL_MODEL = "BERT-Huge-48"

LABEL_LIMIT = 2_000_000
"""Labels of one layer; a model of unequal layers needs most, some gigabytes of memory."""

SEARCHES: Mapping[str, Slip] = {"as_printed": AS_PRINTED, "as_published": AS_PUBLISHED, "repaired": REPAIRED}
"""Slips that Algorithm 3 keeps, by solver."""


def stage_instances() -> Iterator[BenchInstance]:
    """Make an instance for every model and memory limit."""
    for model in paper.TABLE_2_MODELS:
        for memory_gb in paper.TABLE_2:
            stage = partial(the_stage, model, memory_gb)
            own: dict[str, OwnSolver] = {
                solver: partial(_solve, solver, partial(algorithm_3, slips), stage)
                for solver, slips in SEARCHES.items()
            }
            own["labels"] = partial(_solve, "labels", exact_labels, stage)
            name = f"{model}-one-stage-on-{CLUSTER}-{memory_gb}G"
            canonical = partial(_canonical, stage) if model == CANONICAL_MODEL else None
            yield BenchInstance(name, "galvatron_stage", canonical, own_solvers=own, time_limit=SECONDS)


@cache
def the_stage(model: str, memory_gb: int) -> StageProblem:
    """All layers on all devices of the cluster, with all strategies, data and sharded data parallelism together too."""
    memory_limit = memory_gb * GIGABYTE
    micro_batch = DEVICES
    while paper_chain(model, CLUSTER).activation_bytes * micro_batch < DEVICES * memory_limit:
        micro_batch *= 2
    problem = GalvatronCase(CLUSTER, model, memory_gb, "galvatron_bmw").problem()
    return problem.tables(1, micro_batch).stage(0, problem.layers, 1, memory_limit)


def _canonical(stage: Callable[[], StageProblem]) -> StrategyProblem:
    return build_galvatron_stage(stage())


def algorithm_3(slips: Slip, stage: StageProblem, time_limit: float) -> StageResult:
    """The plan of Algorithm 3; the time limit is not used, it takes milliseconds."""
    del time_limit
    found = search_stage(stage, slips=slips)
    if found is None or found.choices is None:
        return StageResult(None, None, 0)
    return StageResult(found.choices, found.cost, 0)


def exact_labels(stage: StageProblem, time_limit: float) -> StageResult:
    """The exact plan, by a search that begins with the best plan of Algorithm 3."""
    deadline = time.monotonic() + time_limit
    published = [algorithm_3(slips, stage, time_limit) for slips in SEARCHES.values()]
    fitting = [found.choices for found in published if found.choices is not None and stage.is_feasible(found.choices)]
    start = min(fitting, key=stage.cost_of, default=None)
    return solve_stage(stage, label_limit=LABEL_LIMIT, deadline=deadline, start=start)


def _solve(
    solver: str,
    search: Callable[[StageProblem, float], StageResult],
    stage_of: Callable[[], StageProblem],
    options: SolveOptions,
    progress: ReportProgress,
    pool: SolverPool | None,
) -> SolveResult:
    stage = stage_of()
    with Meter(pool) as meter:
        found = search(stage, options.time_limit)
        bound = found.bound or None
        return SolveResult(
            _status(found),
            found.choices,
            found.cost,
            bound,
            relative_gap(found.cost, bound),
            solver,
            meter.seconds,
            meter.cpu_seconds,
            meter.peak_rss_bytes,
            () if found.choices is None else (stage.peak(found.choices),),
            () if found.cost is None else (Progress(meter.seconds, found.cost, bound, solver),),
        )


def _status(found: StageResult) -> Status:
    if found.cost is None:
        return Status.INFEASIBLE if found.is_infeasible else Status.NO_SOLUTION
    return Status.OPTIMAL if found.cost == found.bound else Status.FEASIBLE
