"""How solvers on flat arrays begin: with the flat problem, or with nothing left to do."""

from __future__ import annotations

from formulations.encodings.flat import FlatProblem, flatten
from formulations.problem.solution import Claim
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.protocol.solver import ReportIncumbent


def flatten_or_finish(problem: StrategyProblem, incumbent: ReportIncumbent) -> FlatProblem | Claim:
    """Lay a problem out in flat arrays.

    Returns
    -------
    FlatProblem or Claim
        The claim that ends the solve where there is no node (the empty assignment, which is reported, is optimal)
        or where flattening shows that no assignment exists; else the flat problem, without contradiction.
    """
    if not problem.nodes:
        incumbent(())
        return Claim((), 0)
    flat = flatten(problem)
    if flat.contradiction:
        return Claim(None, None, proved_infeasible=True, message=flat.contradiction)
    return flat
