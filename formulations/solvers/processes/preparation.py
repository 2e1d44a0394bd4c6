"""What a solver loads, loaded before it is needed: libraries and compiled loops take a second in a new process."""

from __future__ import annotations

import importlib

import numpy as np

from formulations.problem.solution import SolveOptions
from formulations.problem.strategy_problem import Factor, IntArray, Node, Resource, StrategyProblem, UsageTerm
from formulations.solvers.protocol.registry import SolverSpec

COMPILED = frozenset({"blocks", "greedy", "lagrangian", "peak_prices"})
"""Solvers whose compiled loops take long to load: only running them does that."""

_LAYERS = 8
"""Not tunable: size of the problem that loads compiled loops."""

_OPTIONS = SolveOptions(time_limit=2.0, iteration_limit=2)


def prepare(spec: SolverSpec) -> None:
    """Import a solver and its library; where it has compiled loops, solve a small problem with it."""
    function = spec.load()
    if spec.library is not None and spec.needs_own_process:
        importlib.import_module(spec.library)
    if spec.name in COMPILED:
        function(small_problem(), _OPTIONS, lambda _: None, lambda _: None)


def small_problem() -> StrategyProblem:
    """Equal layers of two nodes, coupled within and between layers, whose cheap strategies do not all fit."""
    cost, amount = np.array([0, 4, 9]), np.array([8, 3, 1])
    rises: IntArray = np.subtract.outer(np.arange(3), np.arange(3)) ** 2
    held: IntArray = np.minimum.outer(amount, amount)
    end = 2 * _LAYERS
    nodes = tuple(Node(f"{i}", cost + i % 2, None, (UsageTerm(0, i, end, amount),)) for i in range(end))
    factors = tuple(Factor((i, i + 1), rises, None, (UsageTerm(0, i, i + 2, held),)) for i in range(end - 1))
    triples = tuple(Factor((i, i + 1, i + 2), np.add.outer(rises, cost)) for i in range(0, end - 2, 2))
    return StrategyProblem("preparation", nodes, factors + triples, (Resource("memory", 5 * end),), end)
