"""Smaller and smaller peaks by local search: whenever an assignment fits, the limit falls.

The search (:mod:`formulations.solvers.local_search.feasibility`) goes on from the assignment that met the last limit.
How far the limit falls is a share of the distance to what is known to be impossible; the share grows with success and
shrinks where the search gives up. No bound is claimed.
"""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np

from formulations.encodings.flat import FlatProblem, FloatArray, flatten
from formulations.problem.checker import check
from formulations.problem.compiled import seed_compiled
from formulations.problem.solution import Claim, SolveOptions
from formulations.problem.strategy_problem import IntArray, StrategyProblem
from formulations.solvers.local_search.feasibility import find_feasible
from formulations.solvers.local_search.tunables import MOVES_AT_ONCE
from formulations.solvers.peaks.tunables import (
    FALLING_FIRST_SHARE,
    FALLING_LARGEST_SHARE,
    FIRST_PATIENCE,
    MORE_PATIENCE,
)
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress


def solve(
    problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent, resource: int
) -> Claim:
    """Lower the peak of ``resource`` until the limit that it has in ``problem``, which must be possible to ask for.

    Parameters
    ----------
    resource
        Its limit is a proven lower bound on all peaks; the limits of the others hold.
    options
        ``initial_choices`` is where to start, whether it fits or not; ``iteration_limit`` counts limits tried.
    """
    deadline = time.monotonic() + options.time_limit
    seed_compiled(options.seed)
    search = _FallingLimit(problem, resource, incumbent)
    if search.flat.contradiction != search.flat.rows.contradiction:
        return Claim(None, None, message=search.flat.contradiction)
    # Rows may well contradict the lowest limit, which the search only comes down to.
    start = None if options.initial_choices is None else search.flat.flat_choices(options.initial_choices)
    choices = np.zeros(len(problem.nodes), dtype=np.int64) if start is None else start
    tried, share, patience = 0, FALLING_FIRST_SHARE, FIRST_PATIENCE
    search.offer(choices)
    while time.monotonic() < deadline and (options.iteration_limit is None or tried < options.iteration_limit):
        tried += 1
        if search.peak is not None and search.peak <= search.lowest:
            break
        if search.descend(share, patience, deadline):
            share = min(FALLING_LARGEST_SHARE, 1.5 * share)
        else:
            share, patience = 0.5 * share, MORE_PATIENCE * patience
    return Claim(search.best, None, iterations=tried)


class _FallingLimit:
    """The best assignment so far, and the search for one with a smaller peak."""

    def __init__(self, problem: StrategyProblem, resource: int, incumbent: ReportIncumbent) -> None:
        self.problem, self.resource, self.incumbent = problem, resource, incumbent
        self.flat: FlatProblem = flatten(problem)
        self.lowest = problem.resources[resource].limit or 0
        self.best: tuple[int, ...] | None = None
        self.peak: int | None = None
        self._choices: IntArray = np.zeros(len(problem.nodes), dtype=np.int64)
        resources = list(problem.resources)
        resources[resource] = replace(resources[resource], limit=None)
        self._unlimited = replace(problem, resources=tuple(resources))

    def offer(self, choices: IntArray) -> bool:
        """Keep an assignment if its peak, in exact integers, is smaller; else search on from it."""
        self._choices = choices.copy()
        original = self.flat.original_choices(choices)
        report = check(self._unlimited, original)
        peak = report.peaks[self.resource].usage
        if not report.ok or (self.peak is not None and peak >= self.peak):
            return False
        self.best, self.peak = original, peak
        self.incumbent(original)
        return True

    def descend(self, share: float, patience: float, deadline: float) -> bool:
        """Ask for a peak that is smaller by a share of what is possible, or for any where there is none yet."""
        if self.peak is None:
            target = sum(int(term.amount.max()) for _, term in self.problem.usage_terms())
        else:
            target = self.peak - max(1, int(share * (self.peak - self.lowest)))
        usage = self.flat.usage._replace(limit=self._limits(target))
        choices = self._choices.copy()
        weights = np.ones(len(usage.limit)), np.ones(len(self.flat.graph.arity))
        costs = self.flat.unary, self.flat.tables, self.flat.penalty
        for _ in range(0, int(patience * len(choices)) + MOVES_AT_ONCE, MOVES_AT_ONCE):
            if find_feasible(self.flat.graph, usage, *costs, choices, *weights, MOVES_AT_ONCE):
                return self.offer(choices)
            if time.monotonic() > deadline:
                break
        return False

    def _limits(self, target: int) -> FloatArray:
        rows = self.flat.rows
        limits: FloatArray = self.flat.usage.limit.copy()
        limits[rows.resource == self.resource] = float(target // rows.quantum[self.resource])
        return limits
