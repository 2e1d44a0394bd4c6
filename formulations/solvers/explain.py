"""One line on why nothing fits: by how much, when, because of what, and which limit would do."""

from __future__ import annotations

from dataclasses import replace

from formulations.problem import StrategyProblem
from formulations.solution import SolveOptions
from formulations.solvers.minimum_peak import MinimumPeak, minimum_peak
from formulations.solvers.worker import SolverPool

_NAMED = 3


def explain_infeasible(
    problem: StrategyProblem, options: SolveOptions | None = None, pool: SolverPool | None = None
) -> str:
    """Explain why a problem has no feasible assignment, or that it has one as far as each limit goes.

    Every limited resource is minimised on its own with the other limits lifted; ``options.time_limit``
    holds for each of them. What is not proved is worded so.

    Parameters
    ----------
    problem
        The problem that seems infeasible.
    options, pool
        As for :func:`formulations.solvers.solve`.

    Returns
    -------
    str
        One line.
    """
    unlimited = replace(problem, resources=tuple(replace(r, limit=None) for r in problem.resources))
    parts = []
    limited = [(r, resource.limit) for r, resource in enumerate(problem.resources) if resource.limit is not None]
    for r, limit in limited:
        found = minimum_peak(unlimited, r, options, pool)
        if found.infeasible:
            return f"{problem.name}: the forbidden combinations exclude every assignment, whatever the limits are"
        text = _explain(found, limit)
        if text:
            parts.append(text)
    if parts:
        return f"{problem.name}: " + "; ".join(parts)
    if not limited:
        return f"{problem.name}: no resource has a limit, so only forbidden combinations can exclude an assignment"
    names = ", ".join(problem.resources[r].name for r, _ in limited)
    return f"{problem.name}: each limit alone ({names}) can be met, but no assignment was found that meets all of them"


def _explain(found: MinimumPeak, limit: int) -> str:
    """Say what one resource lacks; empty where its limit can be met."""
    if found.peak is not None and found.peak <= limit:
        return ""
    start = f"{found.resource} is limited to {limit}"
    if found.peak is None or found.time is None:
        known = f"every assignment needs at least {found.bound}" if found.bound else "no assignment was found"
        return f"{start}, and {known}"
    when = f"time {found.time}" + (f" ({found.time_name})" if found.time_name else "")
    named = ", ".join(f"{' x '.join(names)} {amount}" for names, amount in found.alive[:_NAMED])
    more = f" and {len(found.alive) - _NAMED} more" if len(found.alive) > _NAMED else ""
    at = f"at {when}, where {named}{more} are alive"
    if found.proved:
        lacks = f"{found.peak - limit} less than the smallest possible peak {found.peak} {at}"
        return f"{start}, {lacks}; a limit of {found.peak} fits"
    bound = found.bound or 0
    proof = (
        f"every assignment needs at least {bound}, {bound - limit} more"
        if bound > limit
        else "that this is too little is not proved"
    )
    return f"{start}; {proof}; the smallest peak found is {found.peak} {at}; a limit of {found.peak} fits"
