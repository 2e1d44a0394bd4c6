"""Dynamic programming over a tree decomposition: exact where memory does not bind, else a bound.

The limits are left out and the rest is minimised exactly. If the result happens to keep the limits it is
optimal; if not, its cost is still a lower bound.
"""

from __future__ import annotations

import time

from formulations.encodings.elimination import CostTable, OutOfTimeError, TooWideError, minimise
from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.local_search.incumbent_search import within_limits
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress


def solve(problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent) -> Claim:
    """Minimise the costs without limits; claim a bound, and the choices where they keep the limits.

    A graph that is too wide for the table limit, or too slow for the time limit, gives a claim of nothing
    with a message.
    """
    started = time.monotonic()
    try:
        found = minimise(
            [node.size for node in problem.nodes], cost_tables(problem), deadline=started + options.time_limit
        )
    except TooWideError as error:
        return Claim(None, None, message=f"too wide for dynamic programming: {error}; use lagrangian or highs")
    except OutOfTimeError as error:
        return Claim(None, None, message=f"time limit: {error}")
    if found is None:
        return Claim(None, None, proved_infeasible=True, message="forbidden combinations rule out every assignment")
    bound, choices = found
    feasible = within_limits(problem, choices)
    if feasible:
        incumbent(choices)
    report(Progress(time.monotonic() - started, bound if feasible else None, bound, "tree_dp"))
    if feasible:
        return Claim(choices, bound)
    return Claim(None, bound, message="the cheapest assignment without limits exceeds a limit")


def cost_tables(problem: StrategyProblem) -> list[CostTable]:
    """Return the cost tables of nodes and of all factors that cost or forbid anything."""
    tables = [CostTable((i,), node.cost, node.forbidden) for i, node in enumerate(problem.nodes)]
    tables += [
        CostTable(factor.scope, factor.cost, factor.forbidden)
        for factor in problem.factors
        if factor.cost.any() or factor.forbidden is not None
    ]
    return tables
