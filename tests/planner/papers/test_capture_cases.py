"""CAPTURE's cases: layers of its models, fewer GPUs, errors of predictions."""

from __future__ import annotations

from dataclasses import replace

from formulations.capture.exact import fastest_plan, fewest_gpus, least_peak_plan
from formulations.capture.problem import nodes_of
from formulations.layers.pipeline_schedule import Schedule
from planner.papers.capture.cases import MODELS, CaptureCase
from planner.papers.capture.tables import figure_7


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
