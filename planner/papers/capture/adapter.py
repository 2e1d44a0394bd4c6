"""CAPTURE on a real model: stages of consecutive layers, each by data or by tensor parallelism, as a layer plan.

The paper asks for the least peak on the fullest device. As published, its predictor and Algorithm 4 look for it; else a
dynamic program finds it. Both plans are judged by the replay of their stages. With the objective ``time``
(:mod:`planner.layers.plan.choices`) the fastest plan within the memory limit is found and proven, the paper's future
work, and a note names the least peak.

Stages may have different numbers of devices, or equally many by the choice ``degrees``. There is a problem for every
largest degree, since the micro-batch follows from it, and the best of all is taken. Layers that share a parameter are
in stages of one configuration, which is what the layer executor runs. CAPTURE decides
neither batch nor micro-batches nor checkpointing: the batch is that of the request; there are as many micro-batches as
divide it, at most twice as many as devices, and they run as 1F1B where there are enough of them; all layers are
checkpointed where nothing fits otherwise.

The published predictor profiles the replay on 16 devices of the same kind: with fewer no layer would ever be alone.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from formulations.capture.enumeration import recommend
from formulations.capture.exact import fastest_plan, least_peak_plan
from formulations.capture.predictor import LARGEST_PROFILED, predict, profile_layers
from formulations.capture.problem import (
    CapturePlan,
    PartitionProblem,
    TraceError,
    fewest_stages,
    nodes_of,
    powers_of_two,
    stage_configurations,
)
from formulations.capture.replay import StageReplay, StepTimes
from formulations.capture.slips import AS_PUBLISHED, REPAIRED, Slip
from formulations.galvatron.costs import CostModel
from formulations.layers.layer import LayerChain, tied_layers
from formulations.layers.pipeline_schedule import Schedule
from formulations.problem.solution import Status
from planner.common.infeasibility import InfeasibleError
from planner.common.plan_error import PlanError
from planner.common.units import format_bytes
from planner.layers.plan.choices import kept_slips, slip_names
from planner.layers.plan.document import LayerPlan, LayerRecord, StagePlan
from planner.layers.plan.request import LayerRequest
from planner.layers.plan.settings import strategy_settings
from planner.models.references import planned_model
from planner.papers.galvatron.adapter import SECONDS_PER_COST, device_links

PROFILING_DEVICES = 16
PLACEMENTS = 5_000_000
"""Of Algorithm 4 for one degree: about a second."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    """Stages of one degree, and one configuration for tied layers.

    Parameters
    ----------
    replay, micro_batch
        Memory and time of stages, and the samples in a micro-batch.
    problem, times
        The same as tables.
    least
        The plan of least peak.
    """

    replay: StageReplay
    micro_batch: int
    problem: PartitionProblem
    times: StepTimes
    least: CapturePlan

    @property
    def least_peak(self) -> int:
        """Bytes of the fullest device in that plan."""
        return self.problem.peak(self.least)


def plan_with_capture(request: LayerRequest, chain: LayerChain) -> LayerPlan:
    """Choose stages, and data or tensor parallelism for each.

    Raises
    ------
    PlanError
        The batch is to be decided too.
    InfeasibleError
        No stages of these layers fill the devices, or none fit; the message names the least possible memory.
    """
    started = time.perf_counter()
    if request.search_batch:
        raise PlanError("formulation capture does not search over batches: leave that search out")
    slips = kept_slips(Slip, AS_PUBLISHED, request.slips) if request.as_published else REPAIRED
    found = _decide(request, chain, slips)
    if found.peak > request.tensor_bytes:
        raise InfeasibleError(
            f"memory for tensors {format_bytes(request.tensor_bytes)} on {request.devices} devices: {found.holds()}; "
            "use more devices, more memory or a smaller batch"
        )
    best, plan = found.candidate, found.plan
    step = best.times.seconds(best.problem, plan)
    exact, of_peak = not request.as_published, request.choices["objective"] == "peak"
    record = LayerRecord(
        formulation=request.formulation,
        as_published=request.as_published,
        solver="dynamic program" if exact else "Algorithm 4",
        status=Status.OPTIMAL if exact else Status.FEASIBLE,
        objective_seconds=step,
        bound_seconds=step if exact and not of_peak else None,
        bound_bytes=found.peak if exact and of_peak else None,
        gap=0.0 if exact else None,
        seconds=time.perf_counter() - started,
        stage_peak_bytes=best.problem.stage_peaks(plan),
        tensor_bytes=request.tensor_bytes,
        notes=(
            *chain.notes,
            "layers that share a parameter run alike, which is what runs",
            f"by the replay {found.holds()}",
            *(() if found.complete else (f"Algorithm 4 was ended after {PLACEMENTS} placements of stages",)),
        ),
        choices=request.choices,
        slips=slip_names(slips),
        pins=request.pins,
    )
    return LayerPlan(
        model=planned_model(request.reference),
        devices=request.devices,
        stages=_stages(chain, best.problem, plan),
        micro_batches=best.replay.micro_batches,
        schedule="gpipe" if best.replay.schedule is Schedule.GPIPE else "1f1b",
        optimizer=request.optimizer.name,
        seed=request.reference.seed,
        record=record,
    )


@dataclass(frozen=True, slots=True)
class _Decision:
    """Decision of a search.

    Parameters
    ----------
    candidate, plan
        The plan and its candidate.
    nearest
        The candidate of least peak.
    complete
        Whether the search covered all plans.
    """

    candidate: _Candidate
    plan: CapturePlan
    nearest: _Candidate
    complete: bool = True

    @property
    def peak(self) -> int:
        """Bytes of the fullest device."""
        return self.candidate.problem.peak(self.plan)

    def holds(self) -> str:
        """Text on the peak of the plan and the least peak of any plan."""
        nearest = self.nearest
        return (
            f"the fullest device holds {format_bytes(self.peak)} in {self.candidate.problem.words(self.plan)}, and "
            f"{format_bytes(nearest.least_peak)} at the least, in {nearest.problem.words(nearest.least)}"
        )


def _decide(request: LayerRequest, chain: LayerChain, slips: Slip) -> _Decision:
    """Search all candidates; where nothing fits the plan of least peak.

    Layers are checkpointed where nothing fits otherwise, for both searches alike.

    Raises
    ------
    InfeasibleError
        There is no plan, whatever the memory.
    """
    limit = request.tensor_bytes
    # Whether all layers are checkpointed depends on the memory alone, so that a pin only leaves plans out.
    free = replace(request, pins=(), settings=None)
    candidates = list(_candidates(free, chain, checkpoint=False))
    nearest = _nearest(free, chain, candidates)
    checkpoint = nearest.least_peak > limit
    if checkpoint or request.is_restricted:
        candidates = list(_candidates(request, chain, checkpoint))
        nearest = _nearest(request, chain, candidates)
    if nearest.least_peak > limit:
        return _Decision(nearest, nearest.least, nearest)
    if request.as_published:
        return _published(request, candidates, nearest, slips)
    if request.choices["objective"] == "peak":
        return _Decision(nearest, nearest.least, nearest)
    fitting = [candidate for candidate in candidates if candidate.least_peak <= limit]
    found = [(candidate, fastest_plan(candidate.problem, candidate.times, limit)) for candidate in fitting]
    best, plan = min(found, key=lambda pair: (pair[0].times.step(pair[0].problem, pair[1]), len(pair[1])))
    return _Decision(best, plan, nearest)


def _candidates(request: LayerRequest, chain: LayerChain, checkpoint: bool) -> Iterator[_Candidate]:
    """Problems that have a plan, by degree and by the configuration of tied layers."""
    nodes = nodes_of(request.devices, request.cluster.devices_per_node)
    for degrees, most_stages in _degrees(request, nodes, len(chain)):
        replay = _replay(request, chain, max(degrees), most_stages)
        micro_batch = request.reference.batch // replay.micro_batches
        configurations = stage_configurations(degrees, checkpoint=checkpoint)
        problem = _pinned(request, chain, replay.problem(nodes, configurations, micro_batch))
        times = replay.times(configurations, micro_batch)
        for alternative in _tied_alike(chain, problem):
            try:
                yield _Candidate(replay, micro_batch, alternative, times, least_peak_plan(alternative))
            except TraceError:
                continue  # these layers do not run so


def _degrees(request: LayerRequest, nodes: tuple[int, ...], layers: int) -> Iterator[tuple[tuple[int, ...], int]]:
    """Degrees that stages of one problem may have, and the most stages of its plans."""
    for degree in powers_of_two(min(nodes)):
        stages = request.devices // degree
        if not any(node % degree for node in nodes) and stages <= layers:
            yield (degree,), stages
        degrees = powers_of_two(degree)
        fewest = sum(fewest_stages(node, degrees) for node in nodes)
        if request.choices["degrees"] == "any" and degree > 1 and fewest <= layers:
            yield tuple(degrees), min(request.devices, layers)


def _pinned(request: LayerRequest, chain: LayerChain, problem: PartitionProblem) -> PartitionProblem:
    """The problem without stages that have a layer whose settings break a pin."""
    if not request.is_restricted:
        return problem
    kept = np.array(
        [
            [request.allows(strategy_settings(layer, configuration)) for layer in chain.layers]
            for configuration in problem.configurations
        ]
    )
    broken = np.pad(np.cumsum(~kept, axis=1), ((0, 0), (1, 0)))  # of the layers before each border
    whole = broken[:, None, :] - broken[:, :-1, None] == 0
    return replace(problem, allowed=problem.allowed & whole)


def _replay(request: LayerRequest, chain: LayerChain, degree: int, most_stages: int) -> StageReplay:
    batch = request.reference.batch
    counts = [count for count in range(1, 2 * request.devices + 1) if batch % count == 0]
    divided = [count for count in counts if batch // count % degree == 0]
    micro_batches = max(divided or counts)
    costs = CostModel(
        device_links(request.cluster),
        states_per_parameter=request.states_per_parameter,
        seconds_per_cost=SECONDS_PER_COST,
    )
    schedule = Schedule.ONE_F_ONE_B if micro_batches >= most_stages else Schedule.GPIPE
    borders = tuple(range(len(chain) + 1))
    return StageReplay(chain=chain, borders=borders, model=costs, schedule=schedule, micro_batches=micro_batches)


def _tied_alike(chain: LayerChain, problem: PartitionProblem) -> Iterator[PartitionProblem]:
    """The problem; where layers share a parameter one for each configuration that their stages may have."""
    tied = tied_layers(chain)
    if not tied:
        yield problem
        return
    for shared in range(len(problem.configurations)):
        allowed = problem.allowed.copy()
        for other in range(len(problem.configurations)):
            if other != shared:
                for layer in tied:
                    allowed[other, : layer + 1, layer + 1 :] = False
        yield replace(problem, allowed=allowed)


def _nearest(request: LayerRequest, chain: LayerChain, candidates: list[_Candidate]) -> _Candidate:
    """The candidate of least peak.

    Raises
    ------
    InfeasibleError
        There is no plan, whatever the memory.
    """
    if candidates:
        return min(candidates, key=lambda each: (each.least_peak, each.times.step(each.problem, each.least)))
    if request.is_restricted:
        raise request.refusal()
    nodes = nodes_of(request.devices, request.cluster.devices_per_node)
    degrees = powers_of_two(min(nodes))
    if request.choices["degrees"] == "equal":
        degrees = [max(power for power in degrees if not any(node % power for node in nodes))]
    fewest = sum(fewest_stages(node, degrees) for node in nodes)
    raise InfeasibleError(
        f"{len(chain)} layers and a batch of {request.reference.batch} on {request.devices} devices: stages inside a "
        f"node have at most {max(degrees)} devices, so at least {fewest} stages are needed, each with a layer, and a "
        "degree must divide the micro-batch or the layers; use fewer devices or a larger batch"
    )


def _published(request: LayerRequest, candidates: list[_Candidate], nearest: _Candidate, slips: Slip) -> _Decision:
    """The plan of least predicted peak, ties by the paper's rule.

    Raises
    ------
    InfeasibleError
        The predictor cannot profile the stages of the plans.
    """
    found, complete = [], True
    for candidate in candidates:
        predicted = _predicted(candidate, slips)
        plan = None
        if len(predicted.peaks) > 1:  # by a stage's place, which an enumeration from the first layer on does not know
            with contextlib.suppress(TraceError):
                plan = least_peak_plan(predicted, slips)
        else:
            recommended = recommend(predicted, slips, placement_limit=PLACEMENTS)
            complete, plan = complete and recommended.complete, recommended.plan
        if plan is not None:
            found.append((sorted(set(predicted.gpu_peaks(plan)), reverse=True), candidate, plan))
    if not found:
        raise InfeasibleError(
            f"{request.devices} devices: the published search predicts no plan, because none of its degrees can be "
            "profiled with these layers; use the exact search"
        )
    _, best, plan = min(found, key=lambda each: (each[0], len(each[2])))
    return _Decision(best, plan, nearest, complete)


def _predicted(candidate: _Candidate, slips: Slip) -> PartitionProblem:
    degrees = {1, *candidate.problem.degrees.tolist()}
    profiled = {degree for degree in degrees if degree <= LARGEST_PROFILED}
    profiled |= {2, LARGEST_PROFILED} if max(degrees) > LARGEST_PROFILED else set()
    checkpoint = candidate.problem.configurations[0].checkpoint
    profile = profile_layers(
        candidate.replay, PROFILING_DEVICES, candidate.micro_batch, sorted(profiled), checkpoint=checkpoint
    )
    return predict(profile, candidate.problem, candidate.micro_batch, slips).problem


def _stages(chain: LayerChain, problem: PartitionProblem, plan: CapturePlan) -> tuple[StagePlan, ...]:
    sizes = [int(problem.degrees[stage.configuration]) for stage in plan]
    return tuple(
        StagePlan(
            layers=tuple(
                strategy_settings(layer, problem.configurations[stage.configuration])
                for layer in chain.layers[first : stage.end]
            ),
            devices=size if len(set(sizes)) > 1 else None,
        )
        for (first, stage), size in zip(problem.stages(plan), sizes, strict=True)
    )
