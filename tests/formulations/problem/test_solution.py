"""When a gap is closed, and how solvers on flat arrays begin."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from formulations.problem.solution import Claim, SolveOptions, relative_gap
from formulations.problem.strategy_problem import Factor, Node, Resource, StrategyProblem, UsageTerm
from formulations.solvers.prices.flatten_or_finish import flatten_or_finish


def test_a_gap_is_accepted_as_the_contract_counts_it() -> None:
    values = (-(10**20), -100, -1, 0, 1, 99, 100, 101, 10**20)
    for wanted, objective, bound in itertools.product((0.0, 0.01, 0.5), values, values):
        if bound > objective:
            continue
        gap = relative_gap(objective, bound)
        assert SolveOptions(relative_gap=wanted).accepts(objective, bound) == (gap is not None and gap <= wanted)


def test_a_search_may_look_beyond_the_objective() -> None:
    assert SolveOptions().accepts(0, 0.5)
    assert SolveOptions().accepts(-5, -4.5)
    assert not SolveOptions().accepts(10**17 + 1, 10**17)


def test_no_nodes_are_solved_at_once() -> None:
    told: list[tuple[int, ...]] = []
    assert flatten_or_finish(StrategyProblem("none", (), (), (), 1), told.append) == Claim((), 0)
    assert told == [()]


@pytest.mark.parametrize(
    ("forbidden", "limit", "named"), [(True, 9, "every strategy is forbidden"), (False, 1, "device")]
)
def test_a_contradiction_ends_the_solve(forbidden: bool, limit: int, named: str) -> None:
    usage = (UsageTerm(0, 0, 1, np.array([2, 3])),)
    nodes = tuple(Node(f"n{i}", np.zeros(2, dtype=np.int64), None, usage) for i in range(2))
    flags = np.full((2, 2), forbidden)
    factors = (Factor((0, 1), np.zeros((2, 2), dtype=np.int64), flags),)
    problem = StrategyProblem("never", nodes, factors, (Resource("device", limit),), 1)
    claim = flatten_or_finish(problem, lambda _: pytest.fail("nothing is feasible"))
    assert isinstance(claim, Claim)
    assert claim.proved_infeasible
    assert claim.choices is None
    assert named in claim.message
