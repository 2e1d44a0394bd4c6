"""The part ``stages`` of the suite ``galvatron``: one stage of 48 layers on eight devices, as one canonical problem.

Its own solvers are Algorithm 3 as published and repaired (with 32 MB of granularity), and the exact labels; beside them
any solver of canonical problems may run. All have the same strategies and costs, so what Algorithm 3 loses here is due
to its table and its search over budgets alone. Objective and bound are quanta of a micro-batch with synchronisation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial

from formulations.models.galvatron import StageProblem, build_galvatron_stage
from formulations.models.galvatron_slips import AS_PUBLISHED, REPAIRED, Slip
from formulations.problem import StrategyProblem
from formulations.searches.galvatron_dp import search_stage
from formulations.searches.galvatron_labels import StageResult, solve_stage
from formulations.solution import Progress, SolveOptions, SolveResult, Status, relative_gap
from formulations.solvers import SolverPool
from planner.benchmarks.galvatron_cases import GIGABYTE, GalvatronCase
from planner.benchmarks.metering import Meter
from planner.benchmarks.suites import BenchInstance, OwnSolver, ReportProgress

__all__ = ["stage_instances"]

SECONDS = 10.0
MODEL, CLUSTER, MICRO_BATCH = "BERT-Huge-48", "titan-rtx-8-pcie", 32
LIMITS_GB = (8, 12, 16, 20)


def stage_instances() -> Iterator[BenchInstance]:
    """Make an instance for every memory limit."""
    for memory_gb in LIMITS_GB:
        own: dict[str, OwnSolver] = {
            "as_published": partial(_solve, "as_published", partial(_algorithm_3, AS_PUBLISHED), memory_gb),
            "repaired": partial(_solve, "repaired", partial(_algorithm_3, REPAIRED), memory_gb),
            "labels": partial(_solve, "labels", solve_stage, memory_gb),
        }
        name = f"{MODEL}-one-stage-on-{CLUSTER}-batch-{MICRO_BATCH}-{memory_gb}G"
        yield BenchInstance(
            name, "galvatron_stage", partial(_canonical, memory_gb), own_solvers=own, time_limit=SECONDS
        )


@cache
def the_stage(memory_gb: int) -> StageProblem:
    """All layers on all devices of the cluster, with all strategies, data and sharded data parallelism together too."""
    problem = GalvatronCase(CLUSTER, MODEL, memory_gb, "galvatron_bmw").problem()
    return problem.tables(1, MICRO_BATCH).stage(0, problem.layers, 1, memory_gb * GIGABYTE)


def _canonical(memory_gb: int) -> StrategyProblem:
    return build_galvatron_stage(the_stage(memory_gb))


def _algorithm_3(slips: Slip, stage: StageProblem) -> StageResult:
    found = search_stage(stage, slips=slips)
    if found is None or found.choices is None:
        return StageResult(None, None, 0)
    return StageResult(found.choices, found.cost, 0)


def _solve(
    solver: str,
    search: Callable[[StageProblem], StageResult],
    memory_gb: int,
    options: SolveOptions,
    progress: ReportProgress,
    pool: SolverPool | None,
) -> SolveResult:
    stage = the_stage(memory_gb)
    with Meter(pool) as meter:
        found = search(stage)
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
