from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from support.tiers import slow

from formulations.instances.random_families import FAMILIES, FamilyError, Size, family_problem
from formulations.instances.random_problems import with_limits
from formulations.presolve import presolve
from formulations.problem.checker import check
from formulations.problem.solution import Status
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers import solve_in_process


def degrees(problem: StrategyProblem) -> Counter[int]:
    return Counter(i for factor in problem.factors for i in factor.scope)


def tables(problem: StrategyProblem) -> list[np.ndarray]:
    return [table.cost for table in (*problem.nodes, *problem.factors)]


def least(problem: StrategyProblem) -> list[int]:
    return [int(np.argmin(node.usage[0].amount)) for node in problem.nodes]


@pytest.mark.parametrize("family", FAMILIES)
def test_small_ones_can_be_enumerated_and_only_infeasible_is(family: str) -> None:
    for seed in range(3):
        result = solve_in_process(family_problem(family, "small", seed), "brute_force")
        expected = Status.INFEASIBLE_UNCONFIRMED if family == "infeasible" else Status.OPTIMAL
        assert result.status is expected, (family, seed)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_seed_means_one_problem(family: str) -> None:
    first, again, other = (family_problem(family, "middle", seed) for seed in (0, 0, 1))
    assert first.name == f"{family}-middle-0"
    assert all(np.array_equal(a, b) for a, b in zip(tables(first), tables(again), strict=True))
    assert first.resources == again.resources
    assert not all(np.array_equal(a, b) for a, b in zip(tables(first), tables(other), strict=False))


@pytest.mark.parametrize("size", ["small", "middle", slow("large")])
def test_what_is_planted_is_feasible(size: Size) -> None:
    for family in sorted(FAMILIES.keys() - {"chains", "infeasible", "sparse"}):
        problem = family_problem(family, size)
        assert check(problem, least(problem)).ok, problem.name


def test_families_are_what_they_are_called() -> None:
    middle = {family: family_problem(family, "middle") for family in FAMILIES}
    assert max(degrees(middle["hubs"]).values()) > 100
    assert min(node.size for node in middle["strategies"].nodes) > 100
    assert len(degrees(middle["isolated"])) * 2 == len(middle["isolated"].nodes)
    assert {len(factor.scope) for factor in middle["triples"].factors} == {3}
    share = np.mean([factor.forbidden.mean() for factor in middle["forbidden"].factors if factor.forbidden is not None])
    assert 0.1 < share < 1 / 3
    assert max(degrees(middle["grids"]).values()) == 4


def test_meshes_have_the_costs_of_collectives() -> None:
    """Layouts are points of (dimension per axis); what is not split can be cut out for nothing, and only that."""
    problem = family_problem("meshes", "middle")
    assert {node.size for node in problem.nodes} == {8, 27}
    assert max(degrees(problem).values()) > 50
    for factor in problem.factors:
        assert (factor.cost[0] == 0).all()
        replicated = factor.cost[:, 0]
        assert (replicated[1:] > 0).all()
        assert (factor.cost.max(axis=1) <= replicated).all()


@pytest.mark.slow
def test_the_large_sparse_one_stays_large() -> None:
    problem = family_problem("sparse", "large")
    assert len(problem.nodes) >= 20_000
    assert presolve(problem).after.nodes >= 20_000


def test_the_exact_limit_is_met_exactly() -> None:
    for seed in range(5):
        problem = family_problem("exact", "small", seed)
        limit = problem.resources[0].limit
        assert limit is not None
        assert solve_in_process(problem, "brute_force").peak_usage == (limit,)
        assert solve_in_process(with_limits(problem, [limit - 1]), "brute_force").choices is None


def test_a_tight_limit_binds() -> None:
    problem = family_problem("tight", "small")
    limited, free = (solve_in_process(p, "brute_force").objective for p in (problem, with_limits(problem, [None])))
    assert limited is not None
    assert free is not None
    assert limited > free


def test_too_little_memory_is_not_seen_by_looking_at_pairs() -> None:
    problem = family_problem("infeasible", "small")
    limit = problem.resources[0].limit
    assert limit is not None
    unit = int(problem.nodes[0].usage[0].amount[0])
    assert sum(int(node.usage[0].amount.min()) for node in problem.nodes) < limit  # nor by looking at nodes
    assert 3 * unit * len(problem.nodes) // 2 < limit  # a half of every node small
    assert solve_in_process(with_limits(problem, [limit + unit // 2 + 1]), "brute_force").choices is not None


def test_what_does_not_exist_is_refused_with_what_does() -> None:
    with pytest.raises(FamilyError, match=r"'circles'.*chains"):
        family_problem("circles", "small")
    with pytest.raises(FamilyError, match=r"'huge'.*large"):
        family_problem("chains", "huge")  # type: ignore[arg-type]
    with pytest.raises(FamilyError, match="seed is -1"):
        family_problem("chains", "small", -1)
