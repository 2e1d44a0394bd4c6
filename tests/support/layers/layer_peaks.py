"""Predicted peaks of layer plans beside measured ones."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise

from support.layers.layer_plan_models import layer_reference
from support.layers.layer_runs import LayerOutcome
from support.layers.peak_ratios import PeakRatio

from formulations.galvatron.costs import CostModel, DeviceLinks, layer_tables
from formulations.galvatron.strategies import Dimension, LayerStrategy, Level
from formulations.layers.layer import UNDIVIDED, LayerChain, LayerProfile
from formulations.layers.pipeline_schedule import Schedule
from planner.graph.optimizers import optimizer_named
from planner.layers.plan.document import LayerPlan, LayerSettings
from planner.layers.plan.memory import engine_peaks, plan_profiles
from planner.layers.profiles.folding import fold_layers
from planner.machine.cluster import load_cluster
from planner.models.references import load_step
from planner.strategies.traced_step import trace_step

CAPTURED_LAYERS = 2


@cache
def folded(name: str, dtype: str = "float32") -> tuple[LayerChain, ...]:
    """A small model of two layers folded into blocks, and into modules of blocks."""
    reference = layer_reference(name, CAPTURED_LAYERS, dtype=dtype)
    batches = (reference.batch, 2 * reference.batch)
    steps = [load_step(replace(reference, batch=batch)) for batch in batches]
    traced = [trace_step(step.module, step.example_args, step.example_kwargs, step.loss_fn, "same") for step in steps]
    cluster = load_cluster("titan-rtx-8-pcie")
    return tuple(fold_layers(*traced, batches, cluster, name=name, apart=apart) for apart in (False, True))


def profiles_of(name: str, plan: LayerPlan) -> tuple[LayerProfile, ...]:
    """Profiles of a plan's layers; every block behind the second is like that one."""
    chains = folded(name, plan.model.dtype)
    return plan_profiles(plan, *(_deepened(chain, plan.model.layers or CAPTURED_LAYERS) for chain in chains))


def _deepened(chain: LayerChain, layers: int) -> LayerChain:
    last = rf"\.{CAPTURED_LAYERS - 1}(?=\.|$)"
    repeated = [layer for layer in chain.layers if re.search(last, layer.name)]
    more = [
        replace(layer, name=re.sub(last, f".{index}", layer.name))
        for index in range(CAPTURED_LAYERS, layers)
        for layer in repeated
    ]
    return replace(chain, layers=(*chain.layers, *more))


def published_peaks(plan: LayerPlan, profiles: Sequence[LayerProfile]) -> list[int]:
    """Bytes on one device of every stage as Galvatron-BMW counts them, which knows neither offload nor slices."""
    named = zip(plan.layers, profiles, strict=True)
    chain = LayerChain(
        "planned",
        tuple(
            replace(profile, name=layer.name, split=UNDIVIDED if layer.undivided else profile.split)
            for layer, profile in named
        ),
    )
    strategies = list(dict.fromkeys(map(_strategy, plan.layers)))
    choices = [strategies.index(_strategy(layer)) for layer in plan.layers]
    states = 2 + optimizer_named(plan.optimizer).state(plan.model.dtype).tensors
    model = CostModel(DeviceLinks(plan.devices, 1.0, 1.0), states_per_parameter=states)
    tables = layer_tables(chain, strategies, plan.model.batch // plan.micro_batches, model)
    ends = [0, *accumulate(len(stage.layers) for stage in plan.stages)]
    peaks = []
    for number, (first, end) in enumerate(pairwise(ends)):
        in_flight = Schedule(plan.schedule).in_flight(len(plan.stages), number, plan.micro_batches)
        peaks.append(tables.stage(first, end, in_flight, 0).peak(choices[first:end]))
    return peaks


def _strategy(layer: LayerSettings) -> LayerStrategy:
    degrees = (
        (Dimension.DATA, layer.replicas),
        (Dimension.SHARDED, layer.shards),
        (Dimension.TENSOR, layer.tensor_parallel),
    )
    return LayerStrategy(tuple(Level(kind, degree) for kind, degree in degrees if degree > 1), layer.checkpoint)


def peak_ratios(run: str, name: str, plan: LayerPlan, outcomes: Sequence[LayerOutcome]) -> list[PeakRatio]:
    """Ratios of every stage of a run."""
    profiles = profiles_of(name, plan)
    found, ends = [], list(accumulate(plan.stage_sizes, initial=0))
    predicted = zip(published_peaks(plan, profiles), engine_peaks(plan, profiles), strict=True)
    for stage, (published, engine) in enumerate(predicted):
        measured = max(outcome.peak_bytes for outcome in outcomes[ends[stage] : ends[stage + 1]])
        found.append(PeakRatio(f"{run}, stage {stage}", measured / published, measured / engine.nbytes))
    return found
