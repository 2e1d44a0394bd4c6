"""The restricted master: the best mixture of patterns, by branch and cut.

A pattern is an assignment of the whole problem, so it has one part for every block. The master keeps of every node the
strategies that some pattern gives it: blocks may then take their parts from different patterns, and even mix them
inside, as long as factors allow it. Presolve takes what is left apart into blocks by itself, and usage rows are added
lazily by :mod:`formulations.solvers.exact.highs`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from formulations.encodings.linear_model import linear_columns
from formulations.presolve import presolve
from formulations.presolve.workspace.allowed_strategies import cut_forbidden_strategies
from formulations.problem.solution import SolveOptions
from formulations.problem.strategy_problem import BoolArray, StrategyProblem
from formulations.solvers.columns.tunables import MOST_COLUMNS
from formulations.solvers.exact import highs


def used_strategies(problem: StrategyProblem, patterns: Sequence[tuple[int, ...]]) -> BoolArray:
    """Flag the strategies that some pattern uses: those of the first node, then those of the second, and so on."""
    sizes = np.array([node.size for node in problem.nodes], dtype=np.int64)
    used: BoolArray = np.zeros(int(sizes.sum()), dtype=np.bool_)
    used[np.cumsum(sizes) - sizes + np.array(patterns, dtype=np.int64)] = True
    return used


def mix_patterns(
    problem: StrategyProblem,
    used: BoolArray,
    start: tuple[int, ...] | None,
    options: SolveOptions,
    deadline: float,
) -> tuple[tuple[int, ...] | None, bool]:
    """Solve the problem over the strategies that patterns use.

    Parameters
    ----------
    used
        The strategies, as of :func:`used_strategies`; the patterns need not keep the limits.
    start
        One of them that does, or None.
    options
        For branch and cut; its time limit is set here.
    deadline
        Of :func:`time.monotonic`.

    Returns
    -------
    tuple
        The best assignment found, not checked, or None; and whether there was the time, and the problem small enough,
        to solve it to the end.
    """
    nodes = []
    ends = np.cumsum([node.size for node in problem.nodes])
    for node, forbidden in zip(problem.nodes, np.split(~used, ends[:-1]), strict=True):
        nodes.append(replace(node, forbidden=forbidden if node.forbidden is None else forbidden | node.forbidden))
    cut, lift = cut_forbidden_strategies(replace(problem, nodes=tuple(nodes)))
    core = presolve(cut, deadline=deadline)
    remaining = deadline - time.monotonic()
    if core.contradiction:
        return None, True
    if remaining <= 0 or linear_columns(core.problem) > MOST_COLUMNS:
        return None, False
    if not core.problem.nodes:
        return lift(core.lift(())), True
    kept = None if start is None else lift.project(start)
    projected = None if kept is None else core.lift.project(kept)
    options = replace(options, time_limit=remaining, initial_choices=projected, iteration_limit=None)
    found = highs.solve(core.problem, options, lambda _: None, lambda _: None).choices
    return None if found is None else lift(core.lift(found)), time.monotonic() < deadline
