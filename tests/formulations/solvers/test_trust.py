"""With a library that returns wrong results in place of each, no result is called optimal or infeasible wrongly."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
from support.problems.delicate_problems import delicate_problem
from support.problems.lying_solvers import LIES, targets
from support.problems.solver_truth import Truth, fuzz_problem
from support.tiers import first, slow

from formulations.instances.random_families import FAMILIES, family_problem
from formulations.problem.checker import check
from formulations.problem.solution import Proof, SolveOptions, Status
from formulations.solvers import SOLVERS, SolverPool, minimum_peak, solve, solve_in_process

LIMIT = SolveOptions(time_limit=5)
LIARS = [pytest.param((library, lie), id=f"{library}-{lie}") for library in ("highspy", "ortools") for lie in LIES]


@pytest.fixture(scope="module", params=LIARS)
def liar(request: pytest.FixtureRequest) -> Iterator[tuple[str, SolverPool]]:
    """A library whose solvers all lie in one way, and processes for the tests of that lie."""
    library, lie = request.param
    with pytest.MonkeyPatch.context() as patch, SolverPool() as pool:
        for solver, target in targets(library, lie).items():
            patch.setitem(SOLVERS, solver, target)
        yield library, pool


@cache
def known_problem(seed: int) -> Truth:
    return Truth.of(fuzz_problem(seed) if seed % 2 else delicate_problem(seed))


@pytest.mark.parametrize("seeds", [range(30_000, 30_016), slow(range(30_016, 30_040))], ids=["few", "more"])
def test_no_lie_becomes_a_result(seeds: range, liar: tuple[str, SolverPool]) -> None:
    library, pool = liar
    direct = "highs" if library == "highspy" else "cpsat"
    decided = 0
    for seed in seeds:
        known = known_problem(seed)
        for solver in ("portfolio", direct):
            seconds = 3.0 if solver == "portfolio" else 1.0  # alone, a liar may be at odds with itself to the end
            result = solve(known.problem, solver, SolveOptions(time_limit=seconds, workers=1), pool=pool)
            known.judge_truth(result)
            decided += result.status in (Status.OPTIMAL, Status.INFEASIBLE)
    assert decided > len(seeds)


@pytest.mark.parametrize("family", first(3, FAMILIES))
def test_no_lie_becomes_a_result_of_a_family(family: str, liar: tuple[str, SolverPool]) -> None:
    known = Truth.of(family_problem(family, "small"))
    known.judge_truth(solve(known.problem, "portfolio", LIMIT, pool=liar[1]))


def test_no_lie_becomes_a_smallest_peak(liar: tuple[str, SolverPool]) -> None:
    for seed in range(12):
        problem = delicate_problem(seed)
        found = minimum_peak(problem, 0, SolveOptions(time_limit=2), liar[1])
        true = minimum_of(seed)
        assert not found.infeasible
        assert found.bound <= true
        assert found.peak is None or found.peak >= true


@cache
def minimum_of(seed: int) -> int:
    """The smallest peak by enumeration: the limit falls until nothing fits."""
    problem, limit, least = delicate_problem(seed), None, 0
    while True:
        resources = (replace(problem.resources[0], limit=limit),)
        found = solve_in_process(replace(problem, resources=resources), "brute_force")
        if found.choices is None:
            return least
        least = check(problem, found.choices).peaks[0].usage
        limit = least - 1


@pytest.mark.parametrize("count", [40, slow(100)])
def test_delicate_problems_are_solved_with_a_proof(count: int, pool: SolverPool) -> None:
    """By the engine as it is, each of them exactly; CP-SAT and HiGHS alone need not be right about them."""
    kinds = 0
    for seed in range(count):
        known = Truth.of(delicate_problem(seed))
        result = solve(known.problem, "portfolio", SolveOptions(time_limit=20, workers=1), pool=pool)
        known.judge_truth(result)
        assert result.status is (Status.INFEASIBLE if known.optimum is None else Status.OPTIMAL), seed
        kinds += result.proof is Proof.EXACT
    assert kinds > 0.9 * count
