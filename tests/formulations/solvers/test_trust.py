"""With a library that returns wrong results in place of each, no result is called optimal or infeasible wrongly."""

from __future__ import annotations

import pytest
from support.problems.delicate_problems import delicate_problem
from support.problems.lying_solvers import LIES, targets
from support.problems.solver_truth import Truth, fuzz_problem
from support.tiers import first

from formulations.instances.random_families import FAMILIES, family_problem
from formulations.problem.solution import Proof, SolveOptions, Status
from formulations.solvers import SOLVERS, SolverPool, minimum_peak, solve

PROBLEMS = 40
LIMIT = SolveOptions(time_limit=5)
LIARS = [(library, lie) for library in ("highspy", "ortools") for lie in LIES]


def lying(monkeypatch: pytest.MonkeyPatch, library: str, lie: str) -> None:
    for solver, target in targets(library, lie).items():
        monkeypatch.setitem(SOLVERS, solver, target)


@pytest.mark.slow_cases("highspy-over_the_limit")
@pytest.mark.parametrize(("library", "lie"), LIARS)
def test_no_lie_becomes_a_result(library: str, lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lying(monkeypatch, library, lie)
    direct = "highs" if library == "highspy" else "cpsat"
    decided = 0
    with SolverPool() as pool:
        for seed in range(30_000, 30_000 + PROBLEMS):
            known = Truth.of(fuzz_problem(seed) if seed % 2 else delicate_problem(seed))
            for solver in ("portfolio", direct):
                result = solve(known.problem, solver, SolveOptions(time_limit=3, workers=1), pool=pool)
                known.judge_truth(result)
                decided += result.status in (Status.OPTIMAL, Status.INFEASIBLE)
    assert decided > PROBLEMS


@pytest.mark.parametrize("family", first(3, FAMILIES))
@pytest.mark.parametrize(("library", "lie"), LIARS)
def test_no_lie_becomes_a_result_of_a_family(
    family: str, library: str, lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = Truth.of(family_problem(family, "small"))
    lying(monkeypatch, library, lie)
    with SolverPool() as pool:
        known.judge_truth(solve(known.problem, "portfolio", LIMIT, pool=pool))


@pytest.mark.parametrize(("library", "lie"), LIARS)
def test_no_lie_becomes_a_smallest_peak(library: str, lie: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lying(monkeypatch, library, lie)
    with SolverPool() as pool:
        for seed in range(12):
            problem = delicate_problem(seed)
            found = minimum_peak(problem, 0, SolveOptions(time_limit=2), pool)
            true = minimum_of(problem)
            assert not found.infeasible
            assert found.bound <= true
            assert found.peak is None or found.peak >= true


def minimum_of(problem) -> int:
    """The smallest peak by enumeration: the limit falls until nothing fits."""
    from dataclasses import replace

    from formulations.problem.checker import check
    from formulations.solvers import solve_in_process

    limit, least = None, 0
    while True:
        resources = (replace(problem.resources[0], limit=limit),)
        found = solve_in_process(replace(problem, resources=resources), "brute_force")
        if found.choices is None:
            return least
        least = check(problem, found.choices).peaks[0].usage
        limit = least - 1


def test_delicate_problems_are_solved_with_a_proof() -> None:
    """By the engine as it is, each of them exactly; CP-SAT and HiGHS alone need not be right about them."""
    kinds = 0
    with SolverPool() as pool:
        for seed in range(100):
            known = Truth.of(delicate_problem(seed))
            result = solve(known.problem, "portfolio", SolveOptions(time_limit=20, workers=1), pool=pool)
            known.judge_truth(result)
            assert result.status is (Status.INFEASIBLE if known.optimum is None else Status.OPTIMAL), seed
            kinds += result.proof is Proof.EXACT
    assert kinds > 90
