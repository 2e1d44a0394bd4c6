"""Compiles the solvers' hot loops into numba's cache on disk, once, at installation.

``python -m formulations.warm_up`` solves one small problem that has everything a kernel looks at: pairs and
triples, loops, forbidden entries, usage on nodes and factors, nodes without factors, and a limit that binds; once
so that cheap repairs meet it, once so that only a search for feasibility does.
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np

from formulations.capture.warm_up import warm_up_capture
from formulations.galvatron.warm_up import warm_up_galvatron
from formulations.h3t.warm_up import warm_up_h3t
from formulations.instances.contest import parse_contest_problem
from formulations.osdp.depth_first import warm_up_osdp
from formulations.presolve import presolve
from formulations.problem.solution import SolveOptions
from formulations.problem.strategy_problem import Factor, IntArray, Node, Resource, StrategyProblem, UsageTerm
from formulations.solvers import solve_in_process
from formulations.solvers.improvement import large_neighbourhood

COMPILED_SOLVERS = ("greedy", "hub_branching", "lagrangian", "tree_dp")
STRATEGIES = 4
LENGTH = 12
STRATEGY_BYTES = (90, 60, 30, 10)
LIMITS_BYTES = (260, 170)
PART_COLUMNS = 150
# The clock runs while loops are compiled, so the iterations are the limit.
OPTIONS = SolveOptions(time_limit=600.0, iteration_limit=20)


def warm_up_problem(limit_bytes: int) -> StrategyProblem:
    """A ring with chords, and nodes of their own, whose cheap strategies need more memory than there is."""
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
    small = UsageTerm(0, 0, LENGTH, np.array([3, 1, 0], dtype=np.int64))
    isolated = tuple(Node(f"isolated {i}", np.array([0, 5 + i, 9]), None, (small,)) for i in range(2))
    pairs = [tuple(sorted((i, (i + step) % LENGTH))) for step in (1, 3) for i in range(LENGTH)]
    triples = [(i, i + 2, i + 5) for i in range(0, LENGTH - 5, 3)]
    return StrategyProblem(
        name="warm-up",
        nodes=nodes + isolated,
        factors=tuple(_factor(rng, scope) for scope in (*pairs, *triples)),
        resources=(Resource("memory", limit_bytes),),
        horizon=LENGTH,
    )


def _factor(rng: np.random.Generator, scope: tuple[int, ...]) -> Factor:
    shape = (STRATEGIES,) * len(scope)
    time_of_use = max(scope)
    usage = UsageTerm(0, time_of_use, time_of_use + 1, rng.integers(0, 4, shape))
    return Factor(scope, rng.integers(0, 50, shape), rng.random(shape) < 0.1, (usage,))


def warm_up_contest_file() -> bytes:
    """A contest file that presolve makes smaller: a node that follows another, and one with a strategy for nothing."""
    tie = [10**18, 3, 4, 10**18]
    return json.dumps(
        {
            "problem": {
                "nodes": {
                    "intervals": [[0, 3], [1, 4], [2, 5]],
                    "costs": [[5, 6], [7, 1], [1, 9]],
                    "usages": [[9, 2], [3, 4], [5, 5]],
                },
                "edges": {"nodes": [[0, 1], [1, 2]], "costs": [tie, [1, 9, 4, 9]]},
                "usage_limit": 16,
            }
        }
    ).encode()


def warm_up_engine() -> None:
    """Read a file, reduce problems and solve one with every solver that has compiled loops."""
    for problem in (parse_contest_problem(warm_up_contest_file()), *map(warm_up_problem, LIMITS_BYTES)):
        presolve(problem)
    for solver in COMPILED_SOLVERS:
        for limit_bytes in LIMITS_BYTES:
            solve_in_process(warm_up_problem(limit_bytes), solver, OPTIONS)
    for limit_bytes in LIMITS_BYTES:
        # Parts of the usual size would be the whole of a problem as small as this.
        large_neighbourhood.solve(
            warm_up_problem(limit_bytes),
            OPTIONS,
            lambda _: None,
            lambda _: None,
            part_solver="brute_force",
            first_columns=PART_COLUMNS,
        )


def warm_up_papers() -> None:
    """Run every compiled loop of the papers' searches once."""
    warm_up_capture()
    warm_up_galvatron()
    warm_up_h3t()
    warm_up_osdp()


def main() -> None:
    """Run every compiled loop of the package once, in two processes side by side."""
    started = time.perf_counter()
    with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
        for future in (pool.submit(warm_up_engine), pool.submit(warm_up_papers)):
            future.result()
    print(f"compiled the solvers' loops in {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    main()
