"""CAPTURE's replay of stages, its profiling partitionings, merger and predictor."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from formulations.capture.exact import least_peak_plan
from formulations.capture.predictor import merged_borders, predict, profile_layers, profiling_sizes
from formulations.capture.problem import PartitionProblem, PlannedStage, TraceError, stage_configurations
from formulations.capture.profiling import lines_as_printed, profiling_runs
from formulations.capture.replay import StageReplay, layer_borders
from formulations.capture.slips import AS_PUBLISHED, REPAIRED, Slip
from formulations.galvatron.costs import CostModel, DeviceLinks
from formulations.galvatron.strategies import Dimension
from formulations.layers.layer import LayerChain, LayerProfile, ProfileSource, SplitPart
from formulations.layers.pipeline_schedule import Schedule

MODEL = CostModel(DeviceLinks(4, 2e9, 1e9), states_per_parameter=4, seconds_per_cost=1e-9)


def random_layer(rng: np.random.Generator, name: str, unit: int = 1, **given: int) -> LayerProfile:
    """A layer whose bytes are multiples of a unit."""
    most = {
        "parameter_bytes": 200,
        "input_bytes": 50,
        "output_bytes": 50,
        "saved_bytes": 200,
        "fixed_saved_bytes": 20,
        "forward_workspace_bytes": 200,
        "backward_workspace_bytes": 200,
        "backward_fixed_workspace_bytes": 20,
    }
    sizes = {field: unit * int(rng.integers(0, largest)) for field, largest in most.items()} | given
    split = SplitPart(
        divisor=8,
        parameter_bytes=sizes["parameter_bytes"] // 2,
        saved_bytes=sizes["saved_bytes"] // 2,
        forward_workspace_bytes=sizes["forward_workspace_bytes"] // 3,
        backward_workspace_bytes=sizes["backward_workspace_bytes"] // 3,
        reduced_bytes=8,
    )
    return LayerProfile(
        name=name,
        kind=name,
        **sizes,
        forward_seconds=float(rng.random()),
        backward_seconds=float(rng.random()),
        split=split,
        bytes_source=ProfileSource.PRESET,
        seconds_source=ProfileSource.PRESET,
    )


def random_replay(
    seed: int, layers: int = 6, schedule: Schedule = Schedule.GPIPE, micro_batches: int = 4
) -> StageReplay:
    rng = np.random.default_rng(seed)
    profiles = [random_layer(rng, f"layer {k}") for k in range(layers)]
    if rng.integers(2):
        profiles[-1] = replace(profiles[-1], borrowed_parameter_bytes=30)
    chain = LayerChain(f"random {seed}", tuple(profiles))
    return StageReplay(
        chain=chain, borders=tuple(range(layers + 1)), model=MODEL, schedule=schedule, micro_batches=micro_batches
    )


def stage_by_moments(replay: StageReplay, first: int, end: int, configuration, samples: int, held: int) -> int:
    """Bytes of a stage, moment after moment: micro-batches come forward, then the last of them goes backward."""
    layers = [layer.on_one_of(configuration.degree(Dimension.TENSOR)) for layer in replay.chain.layers]
    samples //= configuration.sample_parts
    stage = layers[first:end]
    parameters = sum(layer.parameter_bytes for layer in stage)
    if first > 0:
        parameters += max(layer.borrowed_parameter_bytes for layer in stage)
    memory = replay.model.states_per_parameter * parameters
    worst = memory

    def kept(layer: LayerProfile) -> int:
        if configuration.checkpoint:
            return samples * layer.input_bytes
        read = layer.input_bytes - layer.unread_input_bytes
        return samples * (read + layer.saved_bytes) + layer.fixed_saved_bytes

    for _ in range(held):
        for layer in stage:
            results = samples * (
                layer.input_bytes + layer.saved_bytes + layer.output_bytes + layer.forward_workspace_bytes
            )
            fixed = layer.fixed_saved_bytes + layer.forward_fixed_workspace_bytes
            worst = max(worst, memory + results + fixed)
            memory += kept(layer)
    for layer in reversed(stage):
        again = samples * layer.saved_bytes + layer.fixed_saved_bytes if configuration.checkpoint else 0
        workspace = samples * layer.backward_workspace_bytes + layer.backward_fixed_workspace_bytes
        worst = max(worst, memory + again + workspace)
        memory -= kept(layer)
    return worst


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize("schedule", [Schedule.GPIPE, Schedule.ONE_F_ONE_B])
def test_a_stage_holds_what_its_moments_hold(schedule: Schedule, checkpoint: bool) -> None:
    configurations = stage_configurations((1, 2, 4), checkpoint=checkpoint)
    for seed in range(6):
        replay = random_replay(seed, 5, schedule)
        problem = replay.problem((4,), configurations, 8)
        for plan in (
            ((2, 0), (3, 2), (5, 0)),
            ((1, 4),),
            ((5, 1),),
            ((1, 0), (2, 0), (3, 0), (5, 0)),
            ((4, 2), (5, 1)),
        ):
            stages = tuple(PlannedStage(*stage) for stage in plan)
            for (first, stage), (position, peak) in zip(
                problem.stages(stages), enumerate(problem.stage_peaks(stages)), strict=True
            ):
                configuration = configurations[stage.configuration]
                whole = first == 0 and stage.end == replay.layers
                held = 1 if whole else replay.in_flight(len(stages), position)
                if len(stages) == 1 and not whole:
                    continue  # no plan
                assert peak == stage_by_moments(replay, first, stage.end, configuration, 8, held), (seed, plan)
        for partition in ((2, 1, 1, 1), (1, 4), (5,)):
            borders = list(pairwise([0, *np.cumsum(partition).tolist()]))
            for configuration in configurations:
                wanted = [
                    stage_by_moments(replay, *stage, configuration, 8, replay.in_flight(len(partition), position))
                    for position, stage in enumerate(borders)
                ]
                assert list(replay.run(partition, configuration, 8)) == wanted


def test_merged_layers_are_the_same_stages() -> None:
    replay = random_replay(1, 8)
    configurations = stage_configurations((1, 2))
    merged = replay.merged((0, 2, 3, 7, 8))
    whole, coarse = (each.problem((2, 2), configurations, 4) for each in (replay, merged))
    assert (coarse.peaks == whole.peaks[:, :, [0, 2, 3, 7]][..., [0, 2, 3, 7, 8]]).all()
    times, coarse_times = (each.times(configurations, 4) for each in (replay, merged))
    assert (coarse_times.repeated == times.repeated[:, [0, 2, 3, 7]][..., [0, 2, 3, 7, 8]]).all()
    assert layer_borders(replay.chain) == (0, 2, 3, 4, 5, 6, 8)
    assert layer_borders(LayerChain("short", replay.chain.layers[:3])) == (0, 1, 2, 3)


def test_what_cannot_run_is_refused_or_not_allowed() -> None:
    replay = random_replay(0)
    configurations = stage_configurations((1, 2, 4))
    assert list(replay.problem((4,), configurations, 2).allowed[:, 0, 6]) == [True, True, False, True, True]
    with pytest.raises(ValueError, match="cannot run as dp4 with 2 samples"):
        replay.run((3, 3), configurations[2], 2)


def test_the_profiling_runs_cover_all_layers() -> None:
    for layers in range(1, 50):
        for stages in range(min(layers, 3), 20):
            runs = profiling_runs(layers, stages)
            assert len(runs.partitions) == len(set(runs.partitions)) <= layers + 1
            assert all(sum(partition) == layers and min(partition) > 0 for partition in runs.partitions)
            if layers > 3:
                assert all(3 <= len(partition) <= stages for partition in runs.partitions)
            assert [runs.group(alone) for alone in runs.alone] == [(k, k + 1) for k in range(layers)]
            for layer, (longer, shorter) in enumerate(runs.added, start=1):
                first, end = runs.group(longer)
                assert end == layer + 1
                assert runs.group(shorter) == (first, layer)
    with pytest.raises(TraceError, match=r"profiling 5 layers on 2 submeshes.*profile on 3 at least"):
        profiling_runs(5, 2)


def test_lines_of_description_1_do_not_hold_all_layers_as_printed() -> None:
    sums = {line: sum(partition) for line, partition in lines_as_printed(64, 16).items()}
    assert sums == {1: 64, 4: 64, 5: 65, 10: 64, 11: 64, 14: 58, 15: 58}
    assert sum(lines_as_printed(16, 16)[14]) == 16


def test_what_adds_up_is_predicted_exactly() -> None:
    """Equal layers hold most at the stage's last one, so that what each adds does not depend on the others."""
    layer = random_layer(np.random.default_rng(0), "layer", 96, fixed_saved_bytes=0)
    chain = LayerChain("equal", tuple(replace(layer, name=f"layer {k}") for k in range(8)))
    for checkpoint in (False, True):
        replay = StageReplay(
            chain=chain, borders=tuple(range(9)), model=MODEL, schedule=Schedule.GPIPE, micro_batches=3
        )
        degrees = (1, 2, 4, 8)
        problem = replay.problem((8, 8), stage_configurations(degrees, checkpoint=checkpoint), 32)
        profile = profile_layers(replay, 16, 32, degrees, checkpoint=checkpoint)
        assert profile.runs == 2 * 5 * 7
        assert profile.sizes == (8, 16)
        found = predict(profile, problem, 32)
        assert (found.problem.peaks == problem.peaks)[:, problem.allowed].all()
        published = predict(profile, problem, 32, AS_PUBLISHED)
        eight = [c for c, configuration in enumerate(problem.configurations) if configuration.devices == 8]
        assert (published.problem.peaks[0, eight] < problem.peaks[0, eight])[in_pipelines(problem)[eight]].all()
        others = [c for c in range(len(problem.configurations)) if c not in eight]
        assert (published.problem.peaks == problem.peaks)[0, others][in_pipelines(problem)[others]].all()


def in_pipelines(problem: PartitionProblem):
    """Stages that are possible, but for that of all layers, which holds one micro-batch."""
    allowed = problem.allowed.copy()
    allowed[:, 0, -1] = False
    return allowed


def test_the_printed_logarithm_falls_to_nothing_and_is_clamped() -> None:
    layer = random_layer(np.random.default_rng(0), "layer", 16, fixed_saved_bytes=0, backward_fixed_workspace_bytes=0)
    divided = replace(layer, parameter_bytes=0, split=SplitPart())
    chain = LayerChain("divided", tuple(replace(divided, name=f"layer {k}") for k in range(6)))
    replay = StageReplay(chain=chain, borders=tuple(range(7)), model=MODEL, schedule=Schedule.GPIPE, micro_batches=2)
    degrees = (1, 2, 4, 8, 16)
    problem = replay.problem((16,), stage_configurations(degrees), 64)
    profile = profile_layers(replay, 16, 64, degrees)
    published, repaired = (
        predict(profile, problem, 64, slips) for slips in (Slip.LOG_FIT | Slip.POSITION_1F1B, REPAIRED)
    )
    names = [str(configuration) for configuration in problem.configurations]
    for degree in (8, 16):
        dp = names.index(f"dp{degree}")
        assert (published.problem.peaks[0, dp] == 0)[problem.allowed[dp]].all()
    assert published.clamped == 6 * 7 // 2  # of degree 16
    assert (repaired.problem.peaks == problem.peaks)[:, in_pipelines(problem)].all()
    assert repaired.clamped == 0


def test_the_place_in_a_1f1b_pipeline_matters_only_to_the_repaired_predictor() -> None:
    """Workspaces are there once, whatever the place."""
    layer = random_layer(np.random.default_rng(2), "layer", 96, fixed_saved_bytes=0)
    chain = LayerChain("equal", tuple(replace(layer, name=f"layer {k}") for k in range(8)))
    for checkpoint in (False, True):
        replay = StageReplay(
            chain=chain, borders=tuple(range(9)), model=MODEL, schedule=Schedule.ONE_F_ONE_B, micro_batches=8
        )
        problem = replay.problem((4, 4), stage_configurations((1, 2, 4), checkpoint=checkpoint), 16)
        profile = profile_layers(replay, 16, 16, (1, 2, 4), checkpoint=checkpoint)
        published, repaired = (predict(profile, problem, 16, slips).problem for slips in (AS_PUBLISHED, REPAIRED))
        assert len(published.peaks) == 1
        assert (repaired.peaks == problem.peaks)[:, problem.allowed].all()
        wrong = np.abs(published.peaks / np.maximum(problem.peaks, 1) - 1)[:, problem.allowed]
        assert wrong.max() > 0.2


def test_layers_merge_where_that_holds_least() -> None:
    alone, added = np.array([5.0, 1.0, 4.0, 9.0]), np.array([0.0, 2.0, 1.0, -3.0])
    # 5+2, 1+1, 4-3: the last two first (1), then 1+1 (2) with what is left: 1, 1 - 3 + ... and so on.
    assert merged_borders(alone, added, 3) == (0, 1, 2, 4)
    assert merged_borders(alone, added, 2) == (0, 1, 4)
    assert merged_borders(alone, added, 4) == (0, 1, 2, 3, 4)
    with pytest.raises(TraceError, match="merging 4 layers to 5"):
        merged_borders(alone, added, 5)


def test_merging_spares_runs_and_predicts_the_merged_model() -> None:
    replay = random_replay(5, 12)
    profile = profile_layers(replay, 16, 16, (1, 2, 4), merge_to=6)
    assert len(profile.borders) == 7
    assert profile.system.layers == 6
    assert profile.runs == 2 * (11 + 4 * 5)
    problem = replay.merged(profile.borders).problem((4, 4), stage_configurations((1, 2, 4)), 16)
    found = predict(profile, problem, 16)
    errors = np.abs(found.problem.peaks / np.maximum(problem.peaks, 1) - 1)[:, problem.allowed]
    assert np.median(errors) < 0.1
    assert problem.peak(least_peak_plan(problem)) <= problem.peak(least_peak_plan(found.problem))


def test_sizes_to_profile_with() -> None:
    assert profiling_sizes(32, (1, 2, 4)) == (8, 16)
    assert profiling_sizes(16, (1, 2, 4)) == (4, 8)
    assert profiling_sizes(8, (1, 2, 4)) == (4, 8)
    assert profiling_sizes(3, (1,)) == (1, 2)
