"""Compiles the solvers' hot loops into numba's cache on disk, once, at installation.

``python -m formulations.warm_up`` solves one small problem that has everything a kernel looks at: pairs and
triples, loops, forbidden entries, usage on nodes and factors, and a limit that binds; once so that cheap
repairs meet it, once so that only a search for feasibility does.
"""

from __future__ import annotations

import time

import numpy as np

from formulations.problem import Factor, IntArray, Node, Resource, StrategyProblem, UsageTerm
from formulations.solution import SolveOptions
from formulations.solvers import solve_in_process

COMPILED_SOLVERS = ("greedy", "lagrangian", "tree_dp")
STRATEGIES = 4
LENGTH = 12
STRATEGY_BYTES = (90, 60, 30, 10)
LIMITS_BYTES = (260, 170)
# The clock runs while loops are compiled, so the iterations are the limit.
OPTIONS = SolveOptions(time_limit=600.0, iteration_limit=20)


def warm_up_problem(limit_bytes: int) -> StrategyProblem:
    """A ring with chords whose cheap strategies need more memory than there is."""
    rng = np.random.default_rng(0)
    cheap_is_large: IntArray = np.array(STRATEGY_BYTES, dtype=np.int64)
    nodes = tuple(
        Node(
            f"node {i}",
            rng.integers(0, 10, STRATEGIES) + 200 - 2 * cheap_is_large,
            np.arange(STRATEGIES) == 3 if i % 5 == 0 else None,
            (UsageTerm(0, i, min(i + 6, LENGTH), cheap_is_large),),
        )
        for i in range(LENGTH)
    )
    pairs = [tuple(sorted((i, (i + step) % LENGTH))) for step in (1, 3) for i in range(LENGTH)]
    triples = [(i, i + 2, i + 5) for i in range(0, LENGTH - 5, 3)]
    return StrategyProblem(
        name="warm-up",
        nodes=nodes,
        factors=tuple(_factor(rng, scope) for scope in (*pairs, *triples)),
        resources=(Resource("memory", limit_bytes),),
        horizon=LENGTH,
    )


def _factor(rng: np.random.Generator, scope: tuple[int, ...]) -> Factor:
    shape = (STRATEGIES,) * len(scope)
    time_of_use = max(scope)
    usage = UsageTerm(0, time_of_use, time_of_use + 1, rng.integers(0, 4, shape))
    return Factor(scope, rng.integers(0, 50, shape), rng.random(shape) < 0.1, (usage,))


def main() -> None:
    """Solve the problem once with every solver that has compiled loops."""
    started = time.perf_counter()
    for solver in COMPILED_SOLVERS:
        for limit_bytes in LIMITS_BYTES:
            solve_in_process(warm_up_problem(limit_bytes), solver, OPTIONS)
    print(f"compiled the solvers' loops in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
