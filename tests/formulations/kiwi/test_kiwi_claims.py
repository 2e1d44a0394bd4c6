"""What workers claim about KIWI's problems counts only as far as it replays."""

from __future__ import annotations

import numpy as np
import pytest
from support.problems.kiwi_graphs import random_graph

from formulations.kiwi.configurations import MOST_ENTRIES
from formulations.kiwi.full_staged import StagedModel
from formulations.kiwi.graph import GraphError, KiwiEdge, KiwiGraph, KiwiOperator
from formulations.kiwi.schedule import StagedDecision, in_order, replay
from formulations.kiwi.solve import solve_kiwi
from formulations.kiwi.worker import MODELS, decode, encode
from formulations.problem.solution import Claim, Proof, Status
from formulations.solvers.processes.worker import Ending, SolverPool, WorkerOutcome
from formulations.step.training_step import NodeKind

GRAPH = random_graph(4)
PLAIN = StagedDecision(tuple(0 for _ in GRAPH.operators), in_order(GRAPH))
PLAIN_REPLAY = replay(GRAPH, PLAIN)


class SayingPool(SolverPool):
    """Answers every job with what it was given for that task."""

    def __init__(self, **claims: Claim | None) -> None:
        super().__init__()
        self.claims = claims

    def run(self, spec, problem, options, listener) -> WorkerOutcome:
        claim = self.claims[spec.target.rpartition(":")[2]]
        ending = Ending.CRASHED if claim is None else Ending.FINISHED
        return WorkerOutcome(ending, claim, "it fell over" if claim is None else "", False, 0.5, 100)


def test_a_decision_survives_transport() -> None:
    assert decode(GRAPH, encode(PLAIN)) == PLAIN


INFEASIBLE = Claim(None, None, proved_infeasible=True)


@pytest.mark.parametrize(
    ("confirm", "status", "proof"),
    [(INFEASIBLE, Status.OPTIMAL, Proof.AGREED), (Claim(None, None), Status.FEASIBLE, None)],
)
def test_an_optimum_needs_two(confirm: Claim, status: Status, proof: Proof | None) -> None:
    pool = SayingPool(solve=Claim(encode(PLAIN), None, claimed=PLAIN_REPLAY.cost), confirm=confirm)
    solution = solve_kiwi(GRAPH, PLAIN_REPLAY.peak, pool=pool)
    assert solution.decision == PLAIN
    assert (solution.result.status, solution.result.proof) == (status, proof)
    assert solution.result.claimed == (None if proof else PLAIN_REPLAY.cost)
    assert solution.result.peak_usage == (PLAIN_REPLAY.peak,)


def test_a_decision_over_the_limit_does_not_count() -> None:
    pool = SayingPool(solve=Claim(encode(PLAIN), None, claimed=1))
    solution = solve_kiwi(GRAPH, PLAIN_REPLAY.peak - 1, pool=pool)
    assert solution.decision is None
    assert (solution.result.status, solution.result.claimed) == (Status.NO_SOLUTION, 1)
    assert str(PLAIN_REPLAY.peak) in solution.result.message


def test_a_claim_above_a_replayed_cost_does_not_count() -> None:
    pool = SayingPool(solve=Claim(encode(PLAIN), None, claimed=PLAIN_REPLAY.cost + 1))
    result = solve_kiwi(GRAPH, None, pool=pool).result
    assert (result.status, result.claimed) == (Status.FEASIBLE, None)
    assert "its claims do not count" in result.message


@pytest.mark.parametrize(
    ("confirm", "status"),
    [
        (INFEASIBLE, Status.INFEASIBLE),
        (Claim(None, None), Status.INFEASIBLE_UNCONFIRMED),
        (None, Status.INFEASIBLE_UNCONFIRMED),
    ],
)
def test_infeasible_needs_two(confirm: Claim | None, status: Status) -> None:
    solution = solve_kiwi(GRAPH, 5, pool=SayingPool(solve=INFEASIBLE, confirm=confirm))
    assert solution.result.status is status
    assert solution.result.bound is None


def test_what_fits_is_not_infeasible() -> None:
    result = solve_kiwi(GRAPH, None, pool=SayingPool(solve=INFEASIBLE, confirm=Claim(encode(PLAIN), None))).result
    assert result.status is Status.FEASIBLE
    assert "nothing is feasible" in result.message


def test_a_crash_is_told() -> None:
    result = solve_kiwi(GRAPH, None, pool=SayingPool(solve=None)).result
    assert result.status is Status.NO_SOLUTION
    assert "it fell over" in result.message


def test_too_many_configurations_are_named() -> None:
    sizes = np.zeros(200, dtype=np.int64)
    operators = (
        KiwiOperator("x", NodeKind.INPUT, sizes, np.arange(200)),
        KiwiOperator("a", NodeKind.FORWARD, sizes, np.arange(200)),
    )
    graph = KiwiGraph("wide", operators, (KiwiEdge(0, 1, np.zeros((200, 200), dtype=np.int64)),))
    with pytest.raises(GraphError, match=f"40000 configurations, more than {MOST_ENTRIES}"):
        StagedModel(graph, 100)


@pytest.mark.parametrize("formulation", MODELS)
def test_every_row_says_what_it_is(formulation: str) -> None:
    """Most by the number of an equation; the others are products, levels and counts of our own."""
    from pyomo.core import Constraint

    model = MODELS[formulation](GRAPH, PLAIN_REPLAY.peak)
    model.refine([(stage, GRAPH.residents) for stage in range(1, GRAPH.stages)])
    words = [str(family.doc) for family in model.model.component_objects(Constraint) if len(family)]
    assert "None" not in words
    assert sum(text.startswith("(") for text in words) >= len(words) / 2
