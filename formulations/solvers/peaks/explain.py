"""One line on why nothing fits: by how much, when, because of what, and which limit would do."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

from formulations.problem.checker import check
from formulations.problem.solution import Progress, SolveOptions
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.peaks.limit_problem import peak_problem, peak_range
from formulations.solvers.peaks.minimum_peak import MinimumPeak, minimum_peak
from formulations.solvers.processes.worker import SolverPool
from formulations.solvers.protocol.registry import DEFAULT_SOLVER
from formulations.solvers.running.run import solve

_NAMED = 3
"""Not tunable: tensors that a message names."""


def explain_infeasible(
    problem: StrategyProblem,
    options: SolveOptions | None = None,
    pool: SolverPool | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> str:
    """Explain why a problem has no feasible assignment, or that it has one as far as each limit goes.

    Every limited resource is minimised on its own with the other limits lifted; where each limit alone can be met,
    limits are looked for that fit together. ``options.time_limit`` holds for all of that. What is not proved is
    worded so.

    Parameters
    ----------
    problem
        The problem that seems infeasible.
    options, pool
        As for :func:`formulations.solvers.solve`.
    progress
        Called with what each search for a peak finds; peaks and bounds are amounts of its resource.

    Returns
    -------
    str
        One line.
    """
    options = options or SolveOptions()
    started = time.monotonic()
    unlimited = replace(problem, resources=tuple(replace(r, limit=None) for r in problem.resources))
    limits = {r: resource.limit for r, resource in enumerate(problem.resources) if resource.limit is not None}
    if not limits:
        return f"{problem.name}: no resource has a limit, so only forbidden combinations can exclude an assignment"

    def share(parts: int) -> SolveOptions:
        remaining = options.time_limit - (time.monotonic() - started)
        return replace(options, time_limit=max(0.1, remaining / parts), initial_choices=None)

    parts = []
    for k, (r, limit) in enumerate(limits.items()):
        found = minimum_peak(unlimited, r, share(len(limits) - k + (len(limits) > 1)), pool, progress)
        if found.infeasible:
            return f"{problem.name}: the forbidden combinations exclude every assignment, whatever the limits are"
        if found.choices is not None and check(problem, found.choices).ok:
            peak = f"{found.resource} peaks at {found.peak}"
            return f"{problem.name}: an assignment fits, in which {peak}; a longer time limit may find it"
        text = _explain(found, limit)
        if text:
            parts.append(text)
    text = "; ".join(parts) or _explain_together(problem, limits, share(1), pool)
    return f"{problem.name}: {text}"


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
    rest = sum(amount for _, amount in found.alive[_NAMED:])
    more = f" and {len(found.alive) - _NAMED} more ({rest})" if len(found.alive) > _NAMED else ""
    at = f"at {when}, where {named}{more} are alive"
    if found.proved:
        lacks = f"{found.peak - limit} less than the smallest possible peak {found.peak} {at}"
        return f"{start}, {lacks}; a limit of {found.peak} fits"
    needs = f"every assignment needs at least {found.bound}"
    proof = f"{needs}, {found.bound - limit} more" if found.bound > limit else f"{needs}, so this may be enough"
    return f"{start}; {proof}; the smallest peak found is {found.peak} {at}; a limit of {found.peak} fits"


def _explain_together(
    problem: StrategyProblem, limits: dict[int, int], options: SolveOptions, pool: SolverPool | None
) -> str:
    """Say which limits fit together, where each alone can be met."""
    names = ", ".join(problem.resources[r].name for r in limits)
    alone = f"each limit alone ({names}) can be met, but no assignment was found that meets all of them"
    lacking = peak_problem(problem, {r: (limit, peak_range(problem, r)[1]) for r, limit in limits.items()})
    result = solve(lacking.problem, DEFAULT_SOLVER, options, pool=pool)
    if result.choices is None:
        return alone
    peaks = check(problem, lacking.original_choices(result.choices)).peaks
    fit = ", ".join(f"{problem.resources[r].name} {max(limit, peaks[r].usage)}" for r, limit in limits.items())
    return f"{alone}; limits that fit together are {fit}"
