"""CAPTURE's problem: the exact programs and the enumeration against all plans of small problems."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from support.problems.capture_problems import (
    all_plans,
    bytes_of_gpus,
    published_winner,
    random_partition,
    random_times,
    step_of,
)

from formulations.capture.enumeration import pipeline_only, recommend, search_mcap
from formulations.capture.exact import fastest_plan, fewest_gpus, least_peak_plan
from formulations.capture.problem import (
    PartitionProblem,
    PlannedStage,
    TraceError,
    fewest_stages,
    nodes_of,
    stage_configurations,
)
from formulations.capture.sampling import prediction_errors, random_plans
from formulations.capture.slips import AS_PRINTED, AS_PUBLISHED, REPAIRED, Slip

SAMPLE_AND_FUZZ = [range(150), pytest.param(range(150, 2500), marks=pytest.mark.fuzz)]


def equal_peaks(layers: int, nodes: tuple[int, ...], degrees=(1, 2, 4), peak: int = 1) -> PartitionProblem:
    configurations = stage_configurations(degrees)
    longer = np.arange(layers + 1) > np.arange(layers)[:, None]
    allowed = np.broadcast_to(longer, (len(configurations), *longer.shape)).copy()
    return PartitionProblem(nodes, configurations, np.full((1, *allowed.shape), peak), allowed)


@pytest.mark.parametrize("seeds", SAMPLE_AND_FUZZ, ids=["sample", "more"])
def test_the_least_peak_is_that_of_all_plans_with_ties_by_leximax(seeds: range) -> None:
    plans_seen, ties = 0, 0
    for seed in seeds:
        problem = random_partition(seed)
        if problem is None:
            continue
        plans = list(all_plans(problem))
        if not plans:
            with pytest.raises(TraceError, match="no plan of"):
                least_peak_plan(problem)
            continue
        plans_seen += 1
        vectors = {plan: sorted(bytes_of_gpus(problem, plan), reverse=True) for plan in plans}
        least = min(vectors.values())
        found = least_peak_plan(problem)
        assert problem.is_plan(found), seed
        assert problem.gpu_peaks(found) == tuple(bytes_of_gpus(problem, found))
        assert vectors[found] == least, seed
        ties += sum(vector[0] == least[0] for vector in vectors.values()) > 1
        if len(problem.peaks) == 1:
            assert found == min(plan for plan, vector in vectors.items() if vector == least), seed
    assert plans_seen > 0.5 * len(seeds)
    assert ties > 0.1 * len(seeds)


@pytest.mark.parametrize("seeds", SAMPLE_AND_FUZZ, ids=["sample", "more"])
def test_the_papers_rule_for_ties_is_kept_exactly(seeds: range) -> None:
    differs = 0
    for seed in seeds:
        problem = random_partition(seed)
        plans = [] if problem is None else list(all_plans(problem))
        if not plans:
            continue
        found, wanted = least_peak_plan(problem, AS_PUBLISHED), published_winner(problem, plans)
        assert set(bytes_of_gpus(problem, found)) == set(bytes_of_gpus(problem, wanted)), seed
        if len(problem.peaks) == 1:
            assert found == wanted, seed
            differs += found != least_peak_plan(problem)
    assert differs


@pytest.mark.parametrize("prune", [True, False])
@pytest.mark.parametrize("seeds", SAMPLE_AND_FUZZ, ids=["sample", "more"])
def test_the_enumeration_finds_what_the_programs_find(seeds: range, prune: bool) -> None:
    lost = 0
    for seed in seeds:
        problem = random_partition(seed, by_place=False)
        plans = [] if problem is None else list(all_plans(problem))
        if not plans:
            continue
        for slips in (REPAIRED, Slip.TIES_DISTINCT):
            found = recommend(problem, slips, prune=prune)
            assert found.complete
            assert found.plan == least_peak_plan(problem, slips), (seed, slips)
        first = recommend(problem, Slip.ALG4_TIES_LOST, prune=prune).plan
        least = min(max(bytes_of_gpus(problem, plan)) for plan in plans)
        assert first == min(plan for plan in plans if max(bytes_of_gpus(problem, plan)) == least), seed
        lost += first != least_peak_plan(problem)
        as_printed = recommend(problem, AS_PRINTED).plan
        narrow = [p for p in plans if all(problem.degrees[stage.configuration] < max(problem.nodes) for stage in p)]
        assert (as_printed is None) == (not narrow), seed
        if as_printed is not None:
            assert least <= problem.peak(as_printed) == min(max(bytes_of_gpus(problem, plan)) for plan in narrow)
    assert lost


@pytest.mark.parametrize("seeds", SAMPLE_AND_FUZZ, ids=["sample", "more"])
def test_the_fastest_plan_within_a_limit(seeds: range) -> None:
    limited = 0
    for seed in seeds:
        problem = random_partition(seed)
        plans = [] if problem is None else list(all_plans(problem))
        if not plans:
            continue
        times = random_times(seed, problem)
        steps = {plan: (step_of(times, plan), max(bytes_of_gpus(problem, plan))) for plan in plans}
        fastest = fastest_plan(problem, times)
        assert times.step(problem, fastest) == steps[fastest][0] == min(step for step, _ in steps.values()), seed
        least = min(peak for _, peak in steps.values())
        for limit in (least, (least + max(peak for _, peak in steps.values())) // 2):
            found = fastest_plan(problem, times, limit)
            fitting = [step for step, peak in steps.values() if peak <= limit]
            assert steps[found][1] <= limit
            assert steps[found][0] == min(fitting), (seed, limit)
            limited += min(fitting) > steps[fastest][0]
        with pytest.raises(TraceError, match=rf"no plan keeps {least - 1} bytes .* holds {least}"):
            fastest_plan(problem, times, least - 1)
    assert limited > 0.1 * len(seeds)


def test_mcap_is_the_enumeration_of_pipelines() -> None:
    checked = 0
    for seed in range(150):
        problem = random_partition(seed, by_place=False)
        if problem is None or problem.gpus > problem.layers:
            continue
        single = pipeline_only(problem)
        plans = [plan for plan in all_plans(problem) if all(stage.configuration == 0 for stage in plan)]
        found = search_mcap(problem)
        assert found.complete
        if not plans:
            assert found.plan is None
            continue
        checked += 1
        least = min(max(bytes_of_gpus(problem, plan)) for plan in plans)
        assert problem.peak(found.plan) == problem.peak(least_peak_plan(single)) == least
    assert checked > 20


def test_degrees_of_which_one_gpu_is_none() -> None:
    problem = equal_peaks(6, (4, 4), degrees=(2,))
    assert recommend(problem).plan == least_peak_plan(problem) == min(all_plans(problem))
    assert {problem.degrees[stage.configuration] for stage in recommend(problem).plan} == {2}


def test_a_limit_of_placements_ends_the_enumeration() -> None:
    problem = equal_peaks(12, (4, 4))
    found = recommend(problem, placement_limit=100)
    assert not found.complete
    assert found.placements == 100
    assert problem.is_plan(found.plan)
    assert recommend(problem, placement_limit=3).plan is None


def test_memory_by_place_is_no_matter_for_the_enumeration() -> None:
    problem = next(filter(None, (random_partition(seed, by_place=True) for seed in range(9))))
    with pytest.raises(ValueError, match="memory that does not depend on a stage's place"):
        recommend(problem)


def test_one_layer_and_one_gpu() -> None:
    assert least_peak_plan(equal_peaks(1, (1,))) == (PlannedStage(1, 0),)
    assert recommend(equal_peaks(1, (4,))).plan == (PlannedStage(1, 2),)
    assert least_peak_plan(equal_peaks(5, (1,))) == (PlannedStage(5, 0),)


def test_more_gpus_than_layers_are_refused_with_the_least_number_of_stages() -> None:
    with pytest.raises(TraceError, match=r"3 layers for 16 GPUs on nodes of 4, 4, 4, 4.*at least 4 stages"):
        equal_peaks(3, (4, 4, 4, 4))
    with pytest.raises(TraceError, match="a node of 3 GPUs cannot be filled by stages of 2 GPUs"):
        fewest_stages(3, (2,))
    with pytest.raises(TraceError, match="every node a GPU"):
        equal_peaks(3, ())
    assert fewest_stages(6, (1, 2, 4)) == 2
    assert fewest_stages(7, (1, 4)) == 4


def test_a_layer_that_runs_in_no_configuration_is_named() -> None:
    problem = equal_peaks(3, (2,))
    problem.allowed[:, 1, :] = problem.allowed[:, 0, 2:] = False
    with pytest.raises(TraceError, match="layer 1 runs in none of them"):
        least_peak_plan(problem)


def test_the_fewest_gpus_that_fit() -> None:
    def halves(gpus: int) -> PartitionProblem:
        problem = equal_peaks(4, nodes_of(gpus, 4))
        sizes = np.arange(5) - np.arange(4)[:, None]
        peaks = 100 * sizes // problem.degrees[:, None, None]
        return PartitionProblem(problem.nodes, problem.configurations, peaks[None], problem.allowed)

    for limit, gpus, nodes in ((400, 1, (1,)), (200, 2, (2,)), (100, 4, (4,)), (75, 6, (4, 2))):
        found = fewest_gpus(halves, limit, 8)
        least = [halves(count).peak(least_peak_plan(halves(count))) for count in range(1, gpus + 1)]
        assert least[-1] <= limit < min(least[:-1], default=limit + 1)
        assert (found.problem.gpus, found.problem.nodes) == (gpus, nodes)
        assert found.problem.peak(found.plan) <= limit
    with pytest.raises(TraceError, match=r"up to 2 holds at most 100 bytes.*2 GPUs come nearest, 200"):
        fewest_gpus(halves, 100, 2)


def test_random_plans_are_all_equally_likely() -> None:
    problem = next(p for p in map(random_partition, range(99)) if p is not None and 10 < len(list(all_plans(p))) < 30)
    plans = list(all_plans(problem))
    drawn = Counter(random_plans(problem, 200 * len(plans), 1))
    assert set(drawn) == set(plans)
    assert all(120 < count < 300 for count in drawn.values())  # 200 each, with a deviation of 14
    some = random_plans(problem, 50, 2, lambda plan: len(plan) == len(plans[0]))
    assert {len(plan) for plan in some} == {len(plans[0])}
    with pytest.raises(TraceError, match="a thousand random plans"):
        random_plans(problem, 1, 3, lambda _: False)


def test_errors_of_predictions_count_every_gpu() -> None:
    held, predicted = equal_peaks(4, (4,), peak=100), equal_peaks(4, (4,), peak=100)
    predicted.peaks[0, 1] = 110  # dp2
    plan = (PlannedStage(1, 1), PlannedStage(3, 0), PlannedStage(4, 0))
    errors = prediction_errors([predicted.gpu_peaks(plan)] * 2, [held.gpu_peaks(plan)] * 2)
    assert errors.per_gpu == pytest.approx([0.1, 0.1, 0, 0] * 2)
    assert errors.per_plan == pytest.approx([0.1, 0.1])
    assert errors.within(0.05) == (0.5, 0.0)
