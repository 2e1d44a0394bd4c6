"""The suite ``osdp``: the paper's models by every method, and the loss of its own search.

Objectives are picoseconds of a step for one sample on one device, because every method chooses its batch size too: the
throughput is the number of devices over this time. An instance that is infeasible under a fixed rule has no objective.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import lru_cache, partial

from formulations.osdp.problem import DP, build_osdp
from formulations.osdp.scheduler import Method, OsdpPlan, plan_osdp
from formulations.problem.solution import Progress, Proof, SolveOptions, SolveResult
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.processes.worker import SolverPool
from formulations.solvers.processes.worker_process import read_status_bytes
from planner.benchmarks.suites import BenchInstance, OwnSolver, ReportProgress, Suite, check_names
from planner.common.units import format_bytes
from planner.papers.osdp.cases import CLUSTERS, FORMULATIONS, LIMITS_GIB, MODELS, OsdpCase
from planner.papers.osdp.report import DEPTH_FIRST, SEARCHED, summarized

PARTS = (*CLUSTERS, "milp")
"""One for each machine, and the canonical problems at the best batch size, for any solver."""

RULES = (Method.REPLICATED, Method.SHARDED)


PAPER_NOTES = (
    "paper, headline: 2.84 times is 3D+OSDP's figure; OSDP's own largest is 2.74 times; its search takes 9 to 307 s",
)
_SOLVER = "highs"
_SECONDS = 2.0


def osdp_suite(parts: Sequence[str] | None = None, models: Sequence[str] | None = None) -> Suite:
    """Make the suite: every model, limit and formulation on every machine.

    Parameters
    ----------
    parts
        Of :data:`PARTS`; all if None.
    models
        Of :data:`planner.papers.osdp.cases.MODELS`; all if None.

    Raises
    ------
    SuiteError
        A part or a model does not exist.
    """
    chosen = PARTS if parts is None else tuple(parts)
    names = tuple(MODELS) if models is None else tuple(models)
    check_names("osdp", "part", chosen, PARTS)
    check_names("osdp", "model", names, MODELS)
    cases = [
        OsdpCase(model, CLUSTERS[part], limit, formulation)
        for part in chosen
        if part in CLUSTERS
        for limit in LIMITS_GIB
        for model in names
        for formulation in FORMULATIONS
    ]
    instances = [BenchInstance(case.name, case.formulation, None, own_solvers=_methods(case)) for case in cases]
    if "milp" in chosen:
        instances += [
            _at_best_batch(OsdpCase(model, CLUSTERS["titan"], max(LIMITS_GIB), formulation))
            for model in names
            for formulation in ("osdp", "osdp_peak")
        ]
    return Suite(
        "osdp",
        tuple(instances),
        _SECONDS,
        solvers=(_SOLVER,),
        notes=(_sizes(names), *PAPER_NOTES),
        summarize=partial(summarized, {case.name: case for case in cases}),
    )


@lru_cache(maxsize=512)
def exact_plan(case: OsdpCase) -> OsdpPlan:
    """The exact plan of a case; in milliseconds, so every other row is compared with it."""
    return case.plan()


def _methods(case: OsdpCase) -> Mapping[str, OwnSolver]:
    searches = DEPTH_FIRST if case.formulation in SEARCHED else ()
    return {method.value: partial(_solve, case, method) for method in (*RULES, *searches, Method.KNAPSACK)}


def _at_best_batch(case: OsdpCase) -> BenchInstance:
    """The canonical problem of a case at its best batch size, or at one sample where nothing fits."""
    batch = max(1, exact_plan(case).batch)
    own: dict[str, OwnSolver] = {Method.KNAPSACK.value: partial(_solve_at, case, batch)}
    return BenchInstance(
        f"{case.name}-batch-{batch}", case.formulation, partial(_canonical, case, batch), own_solvers=own
    )


def _canonical(case: OsdpCase, batch: int) -> StrategyProblem:
    return build_osdp(case.chain(), case.machine(), case.settings, batch)


def _solve(
    case: OsdpCase, method: Method, options: SolveOptions, progress: ReportProgress, pool: SolverPool | None
) -> SolveResult:
    """Solve over all batch sizes; objective per sample."""
    del progress, pool
    started = time.process_time()
    plan = case.plan(method, options.time_limit)
    return _result(case, plan, plan.objective, plan.bound, time.process_time() - started, _message(case, plan))


def _solve_at(
    case: OsdpCase, batch: int, options: SolveOptions, progress: ReportProgress, pool: SolverPool | None
) -> SolveResult:
    """Solve at one batch size; objective of the step, as the canonical problem has it."""
    del options, progress, pool
    chain, machine = case.chain(), case.machine()
    started = time.process_time()
    plan = plan_osdp(chain, machine, case.settings, batch=batch)
    cost, bound = (plan.candidates[0].cost, plan.candidates[0].bound) if plan.candidates else (None, None)
    return _result(case, plan, cost, bound, time.process_time() - started, "")


def _result(
    case: OsdpCase, plan: OsdpPlan, objective: int | None, bound: int | None, cpu_seconds: float, message: str
) -> SolveResult:
    modes = [case.settings.modes(layer) for layer in case.chain().layers]
    places = [modes[i].index(mode) for i, mode in enumerate(plan.modes.values())]
    return SolveResult(
        status=plan.status,
        choices=tuple(places) or None,
        objective=objective,
        bound=bound,
        gap=plan.gap,
        solver=plan.solver,
        seconds=plan.seconds,
        cpu_seconds=cpu_seconds,
        peak_rss_bytes=read_status_bytes("self", "VmHWM"),
        peak_usage=(plan.memory_bytes,) if plan.modes else (),
        history=(Progress(plan.seconds, objective, bound, plan.solver),) if plan.modes else (),
        message=message,
        proof=None if bound is None else Proof.EXACT,
    )


def _message(case: OsdpCase, plan: OsdpPlan) -> str:
    if plan.objective is None:
        return "no plan in time" if plan.candidates else "does not fit at one sample"
    modes = list(plan.modes.values())
    replicated, cut = sum(mode == DP for mode in modes), sum(mode.slices > 1 for mode in modes)
    loss = loss_of(plan.objective, case)
    return (
        f"batch {plan.batch} on each device, {plan.samples_per_second:.2f} samples/s, {replicated} of {len(modes)} "
        f"operators DP, {cut} cut, peak {format_bytes(plan.peak_bytes)}, loses {100 * loss:.3f} %"
    )


def loss_of(objective: int, case: OsdpCase) -> float:
    """Extra time of a plan per sample over the exact one of its case, as a share of the latter."""
    best = exact_plan(case).objective
    assert best is not None, "a plan has been found, so the exact search finds one"
    return objective / best - 1


def _sizes(names: Sequence[str]) -> str:
    chains = [OsdpCase(model, CLUSTERS["titan"], max(LIMITS_GIB), "osdp").chain() for model in names]
    return "; ".join(
        f"{chain.name}: {len(chain)} operators, {chain.parameter_bytes / 4e9:.2f}B parameters" for chain in chains
    )
