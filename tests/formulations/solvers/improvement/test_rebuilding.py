"""Rebuilding parts of an assignment: within the limits, never dearer, and no cheaper than the optimum."""

from __future__ import annotations

import numpy as np
from support.problems.random_problems import random_problem, training_step_problem

from formulations.encodings.flat import flatten
from formulations.problem.checker import check
from formulations.problem.compiled import seed_compiled
from formulations.problem.strategy_problem import IntArray, StrategyProblem
from formulations.solvers import solve_in_process
from formulations.solvers.local_search.incumbent_search import IncumbentSearch

PATIENCE = 5


def rebuilt(problem: StrategyProblem, start: tuple[int, ...], seed: int) -> tuple[IncumbentSearch, IntArray]:
    """The search and what it made of a feasible start, at prices of about the typical cost of a full row."""
    flat = flatten(problem)
    search = IncumbentSearch(problem, flat, lambda *_: None)
    search.offer_original(start)
    choices = flat.flat_choices(start)
    assert choices is not None
    random = np.random.default_rng(seed)
    seed_compiled(seed)
    prices = random.uniform(0.0, 50.0) / np.maximum(flat.usage.limit, 1.0)
    return search, search.rebuild_while_better(choices, prices, random, PATIENCE)


def test_feasible_no_dearer_and_no_cheaper_than_the_optimum() -> None:
    improved = seen = 0
    for seed in range(300):
        problem = random_problem(seed)
        flat = flatten(problem)
        if flat.contradiction or max(flat.rows.quantum, default=1) > 1:
            continue
        optimum = solve_in_process(problem, "brute_force").objective
        random = np.random.default_rng(seed)
        drawn = [tuple(int(random.integers(node.size)) for node in problem.nodes) for _ in range(40)]
        start = next((choices for choices in drawn if check(problem, choices).ok), None)
        if start is None or flat.flat_choices(start) is None:
            continue
        search, choices = rebuilt(problem, start, seed)
        report = check(problem, flat.original_choices(choices))
        before = check(problem, start).objective
        assert report.ok, seed
        assert optimum is not None
        assert optimum <= report.objective <= before, seed
        assert search.objective is not None
        assert search.objective <= report.objective, seed
        improved += report.objective < before
        seen += 1
    assert seen > 100
    assert improved > 50


def test_a_step_that_begins_with_the_least_memory_becomes_much_cheaper() -> None:
    for seed in range(4):
        problem = training_step_problem(seed, operators=24, strategies=3, memory=0.5, factor_usage=False)
        start = tuple(int(np.argmin(node.usage[0].amount)) for node in problem.nodes)
        search, _ = rebuilt(problem, start, seed)
        assert search.objective is not None
        assert search.objective < 0.9 * check(problem, start).objective, seed


def test_the_same_seed_gives_the_same_result_and_patience_ends_it() -> None:
    problem = training_step_problem(5, operators=24, strategies=3, memory=0.5, factor_usage=False)
    start = tuple(int(np.argmin(node.usage[0].amount)) for node in problem.nodes)
    first, second = rebuilt(problem, start, 1)[1], rebuilt(problem, start, 1)[1]
    assert (first == second).all()
    search, found = rebuilt(problem, start, 1)
    none = np.zeros(len(search.flat.usage.limit))
    assert search.rebuild_while_better(found, none, np.random.default_rng(0), 0) is found
