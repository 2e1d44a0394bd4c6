"""The suite ``kiwi-mlp``: the paper's Table 1 on our instance, the full problem beside smaller ones.

``kiwi_full_published`` and ``kiwi_reduced_published`` are the paper's own programs: their times stand beside the
paper's for the same program, and those of our forms of the same problems beside them.

Limits are shares of the smallest peak among the cost-optimal plans without a limit, counting all memory: parameters,
input, activations and weight gradients; the paper's model has no optimizer and no copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from formulations.kiwi.graph import KiwiGraph
from formulations.kiwi.mlp import MlpInstance
from formulations.kiwi.solve import solve_kiwi
from formulations.kiwi.training_step import step_model
from formulations.problem.solution import SolveOptions, SolveResult, Status
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.processes.worker import SolverPool
from formulations.solvers.running.run import solve
from formulations.step.solving.registry import step_problem
from formulations.step.training_step import StepModel
from planner.benchmarks.rows import BenchRow
from planner.benchmarks.suites import BenchInstance, OwnSolver, ReportProgress, Suite, SuiteError

SHARES = (20, 40, 60, 80)
"""Limits in per cent."""

STAGED_FORMULATIONS = ("kiwi_full", "kiwi_reduced")
"""Formulations that the solver ``staged`` solves on the paper's graph."""

PUBLISHED_FORMULATIONS = ("kiwi_full_published", "kiwi_reduced_published")
"""The paper's own programs, which the solver ``published`` solves on the same graph."""

CANONICAL_FORMULATIONS = ("kiwi_chain", "kiwi_reduced", "sharding")
"""Formulations that are canonical problems of the step; named as in :mod:`formulations.step.solving.registry`."""

STAGED, PUBLISHED = "staged", "published"
_SOLVER = "branch_and_bound"


@dataclass(frozen=True, slots=True)
class Unlimited:
    """The best plan without a limit.

    Parameters
    ----------
    cost
        Its cost in quanta, by which the paper divides.
    peak
        The smallest peak in bytes among all plans of that cost.
    """

    cost: int
    peak: int


def kiwi_mlp_suite(instance: MlpInstance | None = None) -> Suite:
    """Make the suite: every formulation at every limit.

    Solves sharding without a limit first, in a worker of its own: the limits are shares of its smallest peak.

    Raises
    ------
    ValueError
        If the instance makes no sense.
    SuiteError
        If that solve does not end with a proof.
    """
    chosen = instance or MlpInstance()
    graph = chosen.graph()
    model = step_model(graph)
    with SolverPool() as pool:
        reference = unlimited(model, pool)
    instances = []
    for share in SHARES:
        limit = reference.peak * share // 100
        for formulation in dict.fromkeys([*STAGED_FORMULATIONS, *PUBLISHED_FORMULATIONS, *CANONICAL_FORMULATIONS]):
            own: dict[str, OwnSolver] = {}
            if formulation in (*STAGED_FORMULATIONS, *PUBLISHED_FORMULATIONS):
                solver = STAGED if formulation in STAGED_FORMULATIONS else PUBLISHED
                own[solver] = partial(_solve_program, graph, limit, formulation)
            load = partial(_problem, model, limit, formulation) if formulation in CANONICAL_FORMULATIONS else None
            name = f"{graph.name}-{share}%-{formulation}"
            instances.append(BenchInstance(name, formulation, load, own_solvers=own))
    notes = (
        str(chosen),
        f"{graph.stages} operators; the best plan without a limit costs {reference.cost:,} quanta of "
        f"{graph.seconds_per_cost} s and peaks at {reference.peak:,} bytes, all memory",
    )
    return Suite(
        "kiwi-mlp", tuple(instances), solvers=(_SOLVER,), notes=notes, summarize=partial(_ratios, reference.cost)
    )


def unlimited(model: StepModel, pool: SolverPool) -> Unlimited:
    """Find the best plan without a limit, and the smallest peak among all that cost as much.

    The limit is lowered below the peak of the plan found last until plans cost more.

    Raises
    ------
    SuiteError
        If a solve does not end with a proof.
    """
    best = solve(step_problem("sharding", model, None).problem, _SOLVER, pool=pool)
    cost, found = best.objective, best
    while found.objective == cost and cost is not None:
        peak = found.peak_usage[0]
        found = solve(step_problem("sharding", model, peak - 1).problem, _SOLVER, pool=pool)
        if found.status not in (Status.OPTIMAL, Status.INFEASIBLE):
            break
    if cost is None or found.status not in (Status.OPTIMAL, Status.INFEASIBLE):
        raise SuiteError(f"suite kiwi-mlp: sharding without a limit was not proved optimal: {found.message}")
    return Unlimited(cost, peak)


def _problem(model: StepModel, memory_limit: int, formulation: str) -> StrategyProblem:
    return step_problem(formulation, model, memory_limit).problem


def _solve_program(
    graph: KiwiGraph,
    memory_limit: int,
    formulation: str,
    options: SolveOptions,
    progress: ReportProgress,
    pool: SolverPool | None,
) -> SolveResult:
    return solve_kiwi(graph, memory_limit, formulation, options, pool, progress).result


def _ratios(cost: int, rows: Sequence[BenchRow]) -> list[str]:
    """Best cost of every row's instance over the best without a limit, as the paper's Table 1 has it."""
    best: dict[str, int] = {}
    for row in rows:
        if row.objective is not None:
            best[row.instance] = min(row.objective, best.get(row.instance, row.objective))
    return [
        f"{instance}: {objective / cost:.4f} times the cost without a limit" for instance, objective in best.items()
    ]
