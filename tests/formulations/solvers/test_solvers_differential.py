"""Thousands of random problems through every solver: none may say anything that enumeration knows to be wrong.

HiGHS, CP-SAT and the portfolio's members run in warm workers, the others in this process. Where costs are too large
for doubles a solver may leave its bound a little below the optimum, but never above it. What fails at length
(``make fuzz``) is shrunk and written to ``tests/fixtures/problems``, where every later run solves it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.problems.problem_files import read_problem, write_problem
from support.problems.random_problems import random_problem, training_step_problem
from support.problems.shrinking import shrunk
from support.problems.solver_truth import EXACT, FIXTURES, HEURISTICS, Truth, fuzz_problem, judge_or_keep
from support.problems.tight_problems import tight_problem
from support.tiers import first, fuzz, slow

from formulations.presolve import presolve
from formulations.problem.checker import check
from formulations.problem.solution import Proof, SolveOptions, Status
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers import SOLVERS, SolverPool, solve, solve_in_process
from formulations.solvers.peaks.limit_problem import peak_problem, peak_range
from formulations.solvers.running import run

OPTIONS = SolveOptions(time_limit=60)
SAMPLE = 1200
"""Problems of which the fast exact solvers are asked all (in `make test` those of the first batches), and everyone else
every fourth."""
BATCHES = 8
AT_ONCE = 3
"""Batches in `make test`."""
OTHERS_STEP = 4
FAST = ("highs", "cpsat")
ALL_LENGTH = 20_000
"""Problems of `make fuzz`, each for every solver but Pyomo's mirror of HiGHS, which takes a second for some."""
LONG_BATCHES = 20
AT_LENGTH = tuple(name for name in (*EXACT, *HEURISTICS) if name != "pyomo")
LEAST_SURVIVORS = 0.2
"""Share of the sample; presolve drops what fits nowhere, which most limits of a few small tables decide."""


def seeds_of(batch: int, batches: int, count: int) -> range:
    return range(batch * count // batches, (batch + 1) * count // batches)


@pytest.mark.parametrize("batch", first(AT_ONCE, range(BATCHES), 2))
@pytest.mark.parametrize("name", FAST)
def test_exact_solvers_agree_with_enumeration(name: str, batch: int, pool: SolverPool) -> None:
    for seed in seeds_of(batch, BATCHES, SAMPLE):
        Truth.of(fuzz_problem(seed)).judge_solver(name, seed, pool)


@pytest.mark.parametrize("start", first(1, range(0, 3 * OTHERS_STEP, OTHERS_STEP), 0))
@pytest.mark.parametrize("name", [name for name in AT_LENGTH if name not in FAST])
def test_everyone_else_says_nothing_wrong(name: str, start: int, pool: SolverPool) -> None:
    for seed in range(start, SAMPLE, 3 * OTHERS_STEP):
        Truth.of(fuzz_problem(seed)).judge_solver(name, seed, pool)


@pytest.mark.slow
def test_pyomo_agrees(pool: SolverPool) -> None:
    for seed in range(6000, 6200):
        Truth.of(random_problem(seed)).judge_exact(solve(random_problem(seed), "pyomo", OPTIONS, pool=pool))


def test_another_solver_of_pyomo_agrees(pool: SolverPool) -> None:
    for seed in range(6100, 6110):
        problem = random_problem(seed, "tiny")
        Truth.of(problem).judge(solve(problem, "pyomo:appsi_highs", OPTIONS, pool=pool))


@pytest.mark.parametrize("sample", [AT_ONCE * SAMPLE // BATCHES, slow(SAMPLE)])
def test_members_are_needed_on_many_of_these_problems(sample: int) -> None:
    """Presolve alone solves most small problems; a sample that it swallows would test nothing else."""
    left = 0
    for seed in range(sample):
        result = presolve(fuzz_problem(seed))
        left += not result.contradiction and any(node.size > 1 for node in result.problem.nodes)
    assert left >= LEAST_SURVIVORS * sample


@pytest.mark.fuzz
@pytest.mark.parametrize("batch", range(LONG_BATCHES))
@pytest.mark.parametrize("name", AT_LENGTH)
def test_every_solver_at_length(name: str, batch: int, pool: SolverPool) -> None:
    for seed in seeds_of(batch, LONG_BATCHES, ALL_LENGTH):
        judge_or_keep(fuzz_problem(seed), name, lambda p, seed=seed: Truth.of(p).judge_solver(name, seed, pool))


@pytest.mark.fuzz
@pytest.mark.parametrize("batch", range(LONG_BATCHES))
def test_presolve_at_length(batch: int) -> None:
    for seed in seeds_of(batch, LONG_BATCHES, ALL_LENGTH):
        judge_or_keep(fuzz_problem(seed), "presolve", judge_presolve)


def judge_presolve(problem: StrategyProblem) -> None:
    """An optimum of what presolve leaves, lifted, is an optimum."""
    optimum = Truth.of(problem).optimum
    reduced = presolve(problem)
    if reduced.contradiction:
        assert optimum is None
        return
    reduced.problem.validate()
    best = solve_in_process(reduced.problem, "brute_force")
    if best.choices is None or best.objective is None:
        assert optimum is None
        return
    assert best.objective + reduced.offset == optimum
    assert check(problem, reduced.lift(best.choices), optimum).ok


@pytest.mark.parametrize("path", sorted(FIXTURES.glob("*.json")), ids=lambda path: path.stem)
@pytest.mark.parametrize("name", AT_LENGTH)
def test_problems_that_once_failed(name: str, path: Path, pool: SolverPool) -> None:
    """One of them: CP-SAT 9.15 with its default presolve certifies a wrong optimum (or-tools issue 5293)."""
    Truth.of(read_problem(path)).judge_solver(name, 0, pool)


@pytest.mark.parametrize("seeds", [range(8000, 8200), fuzz(range(8200, 8500))], ids=["few", "more"])
@pytest.mark.parametrize("tree", ["tree_without_enumeration", "tree_whose_root_fails"])
def test_bounds_of_branch_and_bound_decide(
    tree: str, seeds: range, pool: SolverPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is enumerated, integers from duals alone prove each optimum, and that nothing is feasible."""
    name = "branch_and_bound"
    monkeypatch.setitem(SOLVERS, name, f"support.problems.fake_solvers:{tree}")
    monkeypatch.setattr(run, "PROVERS", ())
    monkeypatch.setattr(run, "CONFIRMERS", ())
    branched = 0
    for seed in seeds:
        known = Truth.of(fuzz_problem(seed))
        result = solve(known.problem, name, OPTIONS, pool=pool)
        if "too large" in result.message:
            continue
        branched += "branches" in result.message
        known.judge_exact(result)
        assert result.proof is Proof.EXACT
    assert branched > len(seeds) // 20


@pytest.mark.parametrize("seeds", [range(5000, 5050), slow(range(5050, 5150))], ids=["few", "more"])
@pytest.mark.parametrize("name", ["highs_lazily", "cpsat_lazily"])
def test_rows_added_as_they_turn_out_to_matter(name: str, seeds: range, pool: SolverPool) -> None:
    for seed in seeds:
        known = Truth.of(fuzz_problem(seed))
        result = solve(known.problem, f"support.problems.fake_solvers:{name}", OPTIONS, pool=pool)
        if known.optimum is None:
            assert result.status is Status.INFEASIBLE, known.problem.name
        else:
            known.judge_exact(result)


@pytest.mark.slow_cases("3-0.3")
@pytest.mark.parametrize(("seed", "memory"), [(1, 0.8), slow(2, 0.5), (3, 0.3)])
def test_training_steps_are_proved_by_highs_and_confirmed_by_cpsat(seed: int, memory: float, pool: SolverPool) -> None:
    problem = training_step_problem(seed, operators=30, strategies=4, memory=memory, forbidden_share=0.1)
    by_highs = solve(problem, "highs", OPTIONS, pool=pool)
    assert by_highs.status is Status.OPTIMAL
    # CP-SAT proves little on one-hot chains; from the optimum on it must at least find nothing better.
    started = SolveOptions(time_limit=5, initial_choices=by_highs.choices)
    by_cpsat = solve(problem, "cpsat", started, pool=pool)
    assert by_cpsat.objective == by_highs.objective
    assert by_cpsat.claimed is None or by_cpsat.claimed <= by_highs.objective


@pytest.mark.parametrize("seeds", [range(1, 3), slow(range(3, 11)), fuzz(range(11, 61))], ids=["few", "more", "many"])
def test_small_amounts_that_matter(seeds: range, pool: SolverPool) -> None:
    """HiGHS's presolve and restarts cut off the optimum of a fifth of these before rows were scaled for that.

    In the problem of the smallest peak every bit of the limit is a node of its own, from one byte to the largest power.
    """
    for seed in seeds:
        step = training_step_problem(seed, 30, 5, memory=0.0)
        reduced = presolve(peak_problem(step, {0: peak_range(step, 0)[:2]}).problem).problem
        if reduced.nodes:
            results = [solve(reduced, solver, replace(OPTIONS, seed=seed), pool=pool) for solver in ("highs", "cpsat")]
            assert [result.status for result in results] == [Status.OPTIMAL, Status.OPTIMAL], seed
            assert results[0].objective == results[1].objective, seed


def test_a_start_is_used_to_fix_columns(pool: SolverPool) -> None:
    problem = training_step_problem(5, operators=60, strategies=5, memory=0.5)
    cold = solve(problem, "highs", OPTIONS, pool=pool)
    warm = solve(problem, "highs", SolveOptions(time_limit=60, initial_choices=cold.choices), pool=pool)
    assert cold.status is warm.status is Status.OPTIMAL
    assert warm.objective == cold.objective


def test_a_failure_is_shrunk_to_what_it_needs(tmp_path: Path) -> None:
    """As if limits on resource r0 were the bug: one node, one strategy, one term and the limit remain."""

    def fails(problem: StrategyProblem) -> bool:
        used = any(term.resource == 0 and term.amount.any() for _, term in problem.usage_terms())
        return used and problem.resources[0].limit is not None

    for problem in filter(fails, map(tight_problem, range(20))):
        small = shrunk(problem, fails)
        small.validate()
        assert fails(small)
        assert [node.size for node in small.nodes] in ([1], [1, 1], [1, 1, 1])
        assert len(list(small.usage_terms())) == 1
        assert not any(node.cost.any() or node.forbidden is not None for node in small.nodes)


def test_problems_are_written_and_read_unchanged(tmp_path: Path) -> None:
    for seed in range(60):
        problem = fuzz_problem(seed)
        path = tmp_path / "problem.json"
        write_problem(path, problem)
        again = read_problem(path)
        assert (again.name, again.horizon, again.resources) == (problem.name, problem.horizon, problem.resources)
        assert Truth.of(again).optimum == Truth.of(problem).optimum
        for mine, theirs in zip((*problem.nodes, *problem.factors), (*again.nodes, *again.factors), strict=True):
            assert np.array_equal(mine.cost, theirs.cost)
            assert (mine.forbidden is None) == (theirs.forbidden is None)
            assert [t.amount.tolist() for t in mine.usage] == [t.amount.tolist() for t in theirs.usage]
