"""The suite ``kiwi-transformer`` on small steps: its names, its limits, and what its rows claim."""

from __future__ import annotations

from itertools import product

import pytest

from formulations.problem.solution import SolveOptions, Status
from planner.benchmarks import Suite, SuiteError, bench
from planner.papers import kiwi_transformer_suite
from planner.papers.kiwi.cases import DEVICE_BYTES, StepCase, prepared
from planner.papers.kiwi.solvers import SMALLEST_PEAK, plan_from_module
from planner.papers.kiwi.transformer import PARTS, paper_case, sweep, within
from planner.session import PlanningSession

SECONDS = 4.0
METHODS = ("sharding", "full_checkpoint", "kiwi_reduced", "kiwi_chain")


@pytest.fixture(scope="module")
def case() -> StepCase:
    return paper_case("decoder", (2,), batch=8, sequence=512, layers=1)


@pytest.fixture(scope="module")
def rows(case: StepCase):
    result = bench(Suite("small", tuple(sweep(case, METHODS, (90, 5)))), time_limit=SECONDS)
    assert result.contradictions() == []
    return {row.instance: row for row in result.rows}


def test_every_part_can_be_asked_for_alone_and_names_are_unique() -> None:
    names = [instance.name for instance in kiwi_transformer_suite().instances]
    assert len(set(names)) == len(names)
    assert names == [instance.name for part in PARTS for instance in kiwi_transformer_suite([part]).instances]
    assert all("1TiB" in name for name in names)
    with pytest.raises(SuiteError, match=r"'head' is no part; use encoder, .*llama"):
        kiwi_transformer_suite(["encoder", "head"])


def test_the_solvers_that_are_asked_for_solve() -> None:
    suite = kiwi_transformer_suite(["recompute"], ["highs", "lagrangian"])
    assert all(list(instance.own_solvers) == ["highs", "lagrangian"] for instance in suite.instances)
    assert suite.solvers == ("highs", "lagrangian")
    assert {instance.time_limit for instance in suite.instances} == {1.0, 5.0}


def test_slow_links_are_slower_and_devices_ample(case: StepCase) -> None:
    slow = paper_case("decoder", (2, 4), slowdown=100).spec()
    fast = paper_case("decoder", (2, 4)).spec()
    assert slow.intra_node.bandwidth == pytest.approx(fast.intra_node.bandwidth / 100)
    assert slow.inter_node is not None
    assert fast.inter_node is not None
    assert slow.inter_node.bandwidth == pytest.approx(fast.inter_node.bandwidth / 100)
    assert slow.device.memory_bytes == DEVICE_BYTES
    assert case.spec().device.memory_bytes == DEVICE_BYTES


def test_limits_are_shares_of_the_free_peak(case: StepCase) -> None:
    ready = prepared(case)
    assert ready.limit(100, of_dynamic=True) == ready.limit(100, of_dynamic=False) == ready.free.peak
    assert ready.limit(50, of_dynamic=False) == ready.free.peak // 2
    matrices = 12 * 5120**2 * 4
    assert ready.limit(0, of_dynamic=True) >= 3 * matrices // 2  # with both moments of AdamW, halved at best


@pytest.mark.slow
def test_smallest_peaks_are_ordered_by_what_formulations_may_do(case: StepCase, rows) -> None:
    peaks = {row.formulation: row for name, row in rows.items() if "smallest-peak" in name}
    assert {row.solver for row in peaks.values()} == {SMALLEST_PEAK}
    assert all(row.bound <= row.objective for row in peaks.values())
    assert peaks["kiwi_reduced"].objective <= peaks["sharding"].objective
    assert peaks["kiwi_chain"].objective <= min(peaks[name].objective for name in METHODS[:3])
    for name, known in prepared(case).smallest.items():
        assert known.decision is not None
        assert prepared(case).session.execute(known.decision).peak == known.peak == peaks[name].objective


@pytest.mark.slow
def test_rows_below_the_smallest_peak_are_infeasible_and_others_fit(case: StepCase, rows) -> None:
    for share, name in product((90, 5), METHODS):
        row = next(row for key, row in rows.items() if f"-{share}%-" in key and row.formulation == name)
        bound, peak = prepared(case).smallest[name].bound, prepared(case).smallest[name].peak
        limit = prepared(case).limit(share, of_dynamic=False)
        assert bound is not None
        assert peak is not None
        assert row.objective is not None or peak > limit  # a plan that fits was known
        if limit < bound:
            assert (row.status, row.objective) == (Status.INFEASIBLE, None)
        elif row.objective is not None:
            assert row.peak_rss_bytes > 0
            assert row.bound is None or row.bound <= row.objective
    assert any(row.status is Status.INFEASIBLE for row in rows.values())
    assert any(row.objective is not None for row in rows.values() if row.solver != SMALLEST_PEAK)


@pytest.mark.slow
def test_from_module_to_checked_plan_fits_its_memory(case: StepCase, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = prepared(case).limit(105, of_dynamic=False)
    replays = []
    original = PlanningSession.replay

    def replay(self: PlanningSession, *arguments, **more):
        replays.append(original(self, *arguments, **more))
        return replays[-1]

    monkeypatch.setattr(PlanningSession, "replay", replay)
    found = plan_from_module(case, "sharding", memory, "portfolio", SolveOptions(SECONDS), lambda _: None, None)
    assert found.objective == replays[-1].total_quanta
    assert replays[-1].peak_bytes <= memory
    assert found.seconds > 0
    assert found.cpu_seconds > 0


@pytest.mark.slow
def test_an_instance_has_its_own_time_limit_unless_another_is_asked_for(case: StepCase, rows) -> None:
    suite = Suite("one", (within(case, "sharding", 95, seconds=1.0),))
    assert [row.time_limit for row in bench(suite).rows] == [1.0]
    assert {row.time_limit for row in rows.values()} == {SECONDS}
