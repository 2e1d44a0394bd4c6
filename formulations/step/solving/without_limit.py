"""Steps whose best known decision without a limit is within the limit: the rest of the time is for that problem.

Reruns and limits only add cost. So nothing within the limit is cheaper than such a decision, but a cheaper decision
without a limit; and the problem without one is smaller and easier. The problem under the limit is not even built.
"""

from __future__ import annotations

from dataclasses import replace

from formulations.problem.solution import SolveResult, Status
from formulations.solvers import solve
from formulations.step.solving.context import NEAR_OPTIMAL, Candidate, SolveContext
from formulations.step.solving.search import Search
from formulations.step.solving.solved import SolvedStep, certified
from formulations.step.training_step import StepDecision

SHARE = 0.8
"""Part of the time for the problem without a limit: its next decision may be over the limit after all."""


def solve_without_limit(kept: Search, context: SolveContext) -> SolvedStep | None:
    """Improve the best decision as one without a limit, where none of those is known to be cheaper.

    Parameters
    ----------
    kept
        The best decision within the limit; a better one is kept there.
    context
        Solver, options, workers and the time that is left.

    Returns
    -------
    SolvedStep or None
        None where the cheapest known decision without a limit is not within it.
    """
    best, free, unlimited = kept.best, context.free, kept.built.unlimited
    if best is None:
        return None
    cost = best.executed.cost
    found = SolveResult(Status.FEASIBLE, None, cost, None, None, context.solver, 0.0, 0.0, 0, (best.executed.peak,))
    if not free.is_near(cost):
        if unlimited is None or not free.is_as_cheap(best):
            return None
        problem = unlimited()
        gap = max(NEAR_OPTIMAL, context.options.relative_gap)
        options = replace(context.within(SHARE * context.options.time_limit).options, relative_gap=gap)
        # Without a limit nothing runs again: the layouts alone cost no more, and the problem contains them.
        options = replace(options, initial_choices=problem.encoded(StepDecision(best.decision.layouts, {})))
        found = context.noted(solve(problem.problem, context.solver, options, context.progress, context.pool))
        if found.choices is not None:
            decision = problem.decode(found.choices)
            kept.keep(decision)
            best = kept.best or best
            free.learn(Candidate(decision, context.execute(decision)), found.known_bound)
    cost = best.executed.cost
    if not (free.is_near(cost) or free.is_as_cheap(best)):
        return None
    bounding = unlimited or (lambda: kept.built)
    return SolvedStep(
        best.decision, certified(replace(found, choices=None), free.bound, cost), lambda: bounding().problem
    )
