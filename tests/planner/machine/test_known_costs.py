"""Measured costs: where they apply, what they correct, and that plans and replays count them alike."""

from __future__ import annotations

import json
from functools import cache

import numpy as np
import pytest
from support.steps.planned_steps import step_reference

from planner.machine.cluster import ClusterSpec, load_cluster
from planner.machine.known_costs import CostSource, KnownCosts, MeasuredCost, MeasuredCosts
from planner.plan.document import schedule_of
from planner.schedule.instructions import Schedule
from planner.session import PlanningSession, PlanRequest

CLUSTER = load_cluster("a100-8-nvlink")
REQUEST = PlanRequest(None, "kiwi_chain", time_limit=20.0, gap=0.01)


def known(*costs: tuple[str, float, float], ranks: int = 2) -> KnownCosts:
    entries = {key: MeasuredCost(seconds=seconds, modelled=modelled) for key, seconds, modelled in costs}
    return KnownCosts({"aten.mm.default": entries}, ranks)


def test_a_measured_cost_is_what_was_measured() -> None:
    costs = known(("2 ranks: small", 3e-6, 1e-6), ("2 ranks: large", 2e-3, 1e-3))
    assert costs.seconds("aten.mm.default", "2 ranks: small", 5.0) == 3e-6
    assert costs.source("aten.mm.default", "2 ranks: small") is CostSource.MEASURED


def test_other_costs_are_corrected_by_those_next_to_them_in_size() -> None:
    costs = known(("2 ranks: small", 3e-6, 1e-6), ("2 ranks: large", 2e-4, 1e-4))
    for modelled, ratio in ((1e-7, 3.0), (1e-6, 3.0), (1e-5, 2.5), (1e-4, 2.0), (4e-3, 2.0)):
        assert costs.seconds("aten.mm.default", "2 ranks: other", modelled) == pytest.approx(ratio * modelled)
    assert costs.source("aten.mm.default", "2 ranks: other") is CostSource.FITTED


def test_costs_of_one_size_count_alike() -> None:
    costs = known(("2 ranks: slow", 9e-6, 1e-6), ("2 ranks: fast", 1e-6, 1e-6), ("2 ranks: usual", 2e-6, 1.001e-6))
    assert costs.seconds("aten.mm.default", "2 ranks: other", 3e-6) == pytest.approx(1.2e-5, rel=1e-3)
    assert costs.least_ratio("aten.mm.default", 1e-7) == pytest.approx(1.0)


def test_the_least_ratio_holds_for_all_larger_predictions() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        sizes = 10.0 ** rng.choice(np.arange(-7, -2, rng.choice([0.5, 0.003])), size=rng.integers(1, 40))
        measured = [(f"2 ranks: {k}", float(size * rng.uniform(0.2, 5)), float(size)) for k, size in enumerate(sizes)]
        costs = known(*measured)
        for modelled in 10.0 ** rng.uniform(-8, -1, size=10):
            least = costs.least_ratio("aten.mm.default", modelled)
            larger = modelled * np.exp(rng.exponential(2.0, size=20))
            assert all(costs.seconds("aten.mm.default", "other", each) >= 0.999999 * least * each for each in larger)
            assert all(seconds >= 0.999999 * least * size for _, seconds, size in measured if size >= modelled)
            above = (modelled, *sizes[sizes >= modelled])
            fitted = [costs.seconds("aten.mm.default", "other", each) / each for each in above]
            ratios = [seconds / size for _, seconds, size in measured if 1.01 * size >= modelled]
            assert least >= 0.999999 * min([*fitted, *ratios]), "no lower than any ratio that is used"
    assert costs.least_ratio("aten.add.Tensor", 1.0) == 1.0


def test_a_kind_that_was_not_measured_is_modelled() -> None:
    costs = known(("2 ranks: small", 3e-6, 1e-6))
    assert costs.seconds("aten.add.Tensor", "2 ranks: small", 5e-6) == 5e-6
    assert costs.source("aten.add.Tensor", "2 ranks: small") is CostSource.MODELLED
    assert not costs.covers("aten.add.Tensor")


def test_measurements_of_another_number_of_ranks_do_not_count() -> None:
    costs = known(("2 ranks: small", 3e-6, 1e-6), ranks=4)
    assert not costs.covers("aten.mm.default")
    assert costs.source("aten.mm.default", "2 ranks: small") is CostSource.MODELLED


def test_only_clusters_with_costs_have_another_fingerprint() -> None:
    costs = {"aten.mm.default": {"2 ranks: small": MeasuredCost(seconds=3e-6, modelled=1e-6)}}
    with_costs = CLUSTER.model_copy(update={"costs": costs})
    assert with_costs.fingerprint() != CLUSTER.fingerprint()
    stored = json.loads(CLUSTER.model_dump_json())
    del stored["costs"]
    assert ClusterSpec.model_validate(stored).fingerprint() == CLUSTER.fingerprint()
    assert ClusterSpec.model_validate_json(with_costs.model_dump_json()) == with_costs


def _measured_at_random(session: PlanningSession, schedule: Schedule, seed: int) -> MeasuredCosts:
    """Costs of every instruction of a schedule, up to five times or a fifth of what is modelled."""
    rng = np.random.default_rng(seed)
    costs: MeasuredCosts = {}
    for instruction in schedule.instructions:
        for part in session.instruction_costs.parts(schedule, instruction):
            factor = float(np.exp(rng.uniform(-1.6, 1.6)))
            entries = costs.setdefault(part.kind, {})
            entries.setdefault(part.signature, MeasuredCost(seconds=factor * part.modelled, modelled=part.modelled))
    return costs


@cache
def planned(name: str, mesh: tuple[int, ...]) -> tuple[PlanningSession, Schedule]:
    session = PlanningSession(step_reference(name), CLUSTER, mesh)
    return session, schedule_of(session.plan(REQUEST), session.graph)


@pytest.mark.fast_cases("gpt2-mesh0")
@pytest.mark.parametrize(("name", "mesh"), [("gpt2", (2,)), ("llama", (2, 2)), ("vit", (2,))])
def test_models_and_replays_count_measured_costs_alike(name: str, mesh: tuple[int, ...]) -> None:
    """A session refuses a plan whose model and replay differ; the same schedule costs what was measured."""
    session, schedule = planned(name, mesh)
    costs = _measured_at_random(session, schedule, len(name))
    measured = PlanningSession(step_reference(name), CLUSTER.model_copy(update={"costs": costs}), mesh)
    spent = measured.instruction_costs.seconds_by_source(schedule)
    assert spent[CostSource.FITTED] == spent[CostSource.MODELLED] == 0.0
    total = measured.replay(schedule).total_quanta
    assert total is not None
    assert spent[CostSource.MEASURED] == pytest.approx(total * 1e-9, rel=1e-3)
    plan = measured.plan(REQUEST)
    assert plan.decision.predicted.objective_ns <= total
    (line,) = [note for note in plan.record.notes if note.startswith("costs of the step: ")]
    assert "measured" in line


def test_signatures_tell_apart_what_takes_different_times() -> None:
    session, schedule = planned("gpt2", (2,))
    by_signature: dict[tuple[str, str], set[int]] = {}
    for instruction in schedule.instructions:
        for part in session.instruction_costs.parts(schedule, instruction):
            by_signature.setdefault((part.kind, part.signature), set()).add(round(part.modelled * 1e12))
    assert len(by_signature) >= 30
    assert all(len(modelled) == 1 for modelled in by_signature.values())
