"""The suite capture: its cases, its rows, and what its last lines say."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from formulations.capture.exact import fastest_plan, fewest_gpus, least_peak_plan
from formulations.capture.problem import nodes_of
from formulations.layers.pipeline_schedule import Schedule
from formulations.problem.solution import Status
from planner.benchmarks import Suite, SuiteError, bench
from planner.papers.capture.bench import HYBRID, PARTS, PIPELINE, CaptureCell, capture_suite, figure_7
from planner.papers.capture.cases import MODELS, CaptureCase


@pytest.fixture(scope="module")
def cells() -> list[CaptureCell]:
    return [
        CaptureCell(CaptureCase("Wide-ResNet-1B", 768, Schedule.GPIPE, (3, 3))),
        CaptureCell(CaptureCase("MoE-2.4B", 1024, Schedule.ONE_F_ONE_B, (2, 2))),
    ]


@pytest.fixture(scope="module")
def rows(cells):
    return bench(Suite("two", tuple(cell.instance(HYBRID) for cell in cells), 60.0)).rows


def test_the_exact_peak_is_proven_and_below_all_others(rows, cells) -> None:
    for cell in cells:
        by = {row.solver: row for row in rows if row.instance == str(cell.case)}
        assert tuple(by) == HYBRID
        exact = by.pop("exact")
        assert exact.status is Status.OPTIMAL
        assert exact.bound == exact.objective == cell.case.problem.peak(cell.found["exact"])
        assert all(exact.objective <= row.objective for row in by.values())
        assert not any(row.contradiction for row in by.values())
        fastest = cell.rate("throughput_first")
        fitting = [s for s in HYBRID if cell.case.problem.peak(cell.found[s]) <= cell.case.limit]
        assert fastest >= max(map(cell.rate, fitting))


def test_the_last_lines_say_what_is_saved_and_lost(rows, cells) -> None:
    for cell in cells:
        (line,) = cell.lines()
        assert line.startswith(f"{cell.case}: throughput_first ")
        assert line.count("saves") == line.count("loses") == len(HYBRID) - 1
        saved = 1 - cell.case.problem.peak(cell.found["exact"]) / cell.case.problem.peak(cell.found["throughput_first"])
        assert f"exact saves {100 * saved:.2f} %" in line
        assert saved > 0.2
    assert CaptureCell(cells[0].case).lines() == []


def test_models_have_the_layers_of_table_1() -> None:
    layers = {model: CaptureCase(model, MODELS[model][0][0], Schedule.GPIPE).problem.layers for model in MODELS}
    assert layers == {
        "GPT-3-2.6B": 32,
        "GPT-3-6.7B": 32,
        "MoE-2.4B": 16,
        "MoE-7.1B": 16,
        "Wide-ResNet-1B": 16,
        "Wide-ResNet-2B": 16,
    }
    assert [CaptureCase(m, MODELS[m][0][0], Schedule.GPIPE).micro_batch for m in MODELS] == [16, 32, 32, 32, 32, 32]
    assert CaptureCase("MoE-7.1B", 1024, Schedule.GPIPE).profile.runs == 2 * 5 * 15
    merged = CaptureCase("GPT-3-6.7B", 1024, Schedule.GPIPE, merge_to=16)
    assert merged.problem.layers == 16
    assert merged.profile.runs == 2 * (31 + 4 * 15)


def test_fewer_gpus_hold_more_and_the_fewest_that_fit_are_found() -> None:
    case = CaptureCase("Wide-ResNet-1B", 768, Schedule.GPIPE)

    def on(gpus: int):
        return replace(case, nodes=nodes_of(gpus, 4)).problem

    peaks = {gpus: on(gpus).peak(least_peak_plan(on(gpus))) for gpus in range(1, 17)}
    assert peaks[6] > peaks[8] > peaks[16]
    for limit in (case.limit, peaks[8], peaks[6] - 1, peaks[16]):
        found = fewest_gpus(on, limit, 16)
        assert found.problem.gpus == min(gpus for gpus, peak in peaks.items() if peak <= limit)
        assert found.problem.peak(found.plan) == peaks[found.problem.gpus]
    assert case.problem.peak(fastest_plan(case.problem, case.times, peaks[16])) <= peaks[16]


def test_predictions_are_better_for_gpipe_than_where_the_place_matters() -> None:
    gpipe, one_f_one_b = (figure_7(schedule, plans=60) for schedule in (Schedule.GPIPE, Schedule.ONE_F_ONE_B))
    assert gpipe["published"].per_gpu.shape == (60 * 16,)
    assert gpipe["published"].per_plan.shape == (60,)
    assert gpipe["published"].within(0.02) > one_f_one_b["published"].within(0.02)
    assert one_f_one_b["repaired"].within(0.05)[1] > one_f_one_b["published"].within(0.05)[1]


def test_parts_have_the_papers_experiments() -> None:
    sizes = {part: len(capture_suite([part]).instances) for part in PARTS}
    assert sizes == {"hybrid": 14, "pipeline": 14, "smaller": 4, "times": 4}
    names = Counter(instance.name for instance in capture_suite().instances)
    assert {name for name, count in names.items() if count > 1} == {"Wide-ResNet-1B-768-gpipe-4+4+4+4"}
    pipelines = capture_suite(["pipeline"]).instances
    assert all(tuple(instance.own_solvers) == PIPELINE for instance in pipelines)
    with pytest.raises(SuiteError, match="'table-3' is no part"):
        capture_suite(["table-3"])
