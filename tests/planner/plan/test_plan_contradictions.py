"""What solvers may say of one another without one of them being wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from formulations.problem.solution import Status
from planner.plan.decision import MemoryOverTime, Predicted
from planner.plan.document import Certificate, CrossCheck, certificate_contradiction


def contradiction(objective, bound, status, *checks):
    predicted = Predicted(
        objective_ns=objective,
        bound_ns=bound,
        peak_bytes=0,
        peak_instruction=-1,
        memory=MemoryOverTime(instructions=(-1,), bytes={}),
    )
    certificate = Certificate(solver="highs", status=status, seconds=0.0, cross_checks=checks)
    return certificate_contradiction(certificate, predicted)


def another(status, objective=None, bound=None, solver="greedy"):
    return CrossCheck(solver=solver, status=status, objective_ns=objective, bound_ns=bound)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((100, 100, Status.OPTIMAL, another(Status.FEASIBLE, 100)), None),
        ((100, 90, Status.FEASIBLE, another(Status.FEASIBLE, 95, 95)), None),
        ((100, None, Status.FEASIBLE, another(Status.FEASIBLE, 50)), None),
        ((100, 90, Status.OPTIMAL, another(Status.FEASIBLE, 95)), None),
        ((100, 100, Status.OPTIMAL, another(Status.NO_SOLUTION), another(Status.BOUND_ONLY, None, 80)), None),
        ((100, 100, Status.OPTIMAL, another(Status.INFEASIBLE_UNCONFIRMED)), None),
        ((100, 110, Status.FEASIBLE), "highs has a plan of 100 ns, below the bound of 110 ns of highs"),
        (
            (100, 100, Status.OPTIMAL, another(Status.FEASIBLE, 99)),
            "greedy has a plan of 99 ns, below the optimum of 100 ns of highs",
        ),
        (
            (100, None, Status.OPTIMAL, another(Status.FEASIBLE, 99)),
            "greedy has a plan of 99 ns, below the optimum of 100 ns of highs",
        ),
        (
            (100, 90, Status.FEASIBLE, another(Status.BOUND_ONLY, None, 101)),
            "highs has a plan of 100 ns, below the bound of 101 ns of greedy",
        ),
        (
            (100, 90, Status.FEASIBLE, another(Status.OPTIMAL, 101, 101)),
            "highs has a plan of 100 ns, below the optimum of 101 ns of greedy",
        ),
        (
            (100, 90, Status.FEASIBLE, another(Status.FEASIBLE, 92), another(Status.BOUND_ONLY, None, 95, "tree")),
            "greedy has a plan of 92 ns, below the bound of 95 ns of tree",
        ),
        (
            (100, 90, Status.FEASIBLE, another(Status.INFEASIBLE)),
            "greedy claims that no plan exists, highs found one",
        ),
    ],
)
def test_contradictions(arguments, message):
    assert contradiction(*arguments) == message


@given(
    optimum=st.integers(10, 100),
    claims=st.lists(st.tuples(st.integers(0, 20), st.integers(0, 10)), max_size=4),
    slack=st.tuples(st.integers(0, 20), st.integers(0, 10)),
)
def test_true_claims_never_contradict(optimum, claims, slack):
    checks = [another(Status.FEASIBLE, optimum + above, optimum - below) for above, below in claims]
    assert contradiction(optimum + slack[0], optimum - slack[1], Status.FEASIBLE, *checks) is None
