"""Checks of a layer plan that need no model, and the mesh of prime axes that its degrees require.

Every message names what would be possible instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import pairwise

from planner.common.plan_error import PlanError
from planner.layers.plan.document import LayerPlan, LayerSettings
from planner.layers.plan.pins import broken_by


def divisors(number: int) -> list[int]:
    """Divisors of a positive number, ascending."""
    return [candidate for candidate in range(1, number + 1) if number % candidate == 0]


def prime_factors(number: int) -> list[int]:
    """Prime factors of a positive number with repetition, ascending."""
    factors = []
    divisor = 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors


def stage_axes(devices: int, layers: Iterable[LayerSettings]) -> tuple[int, ...]:
    """Sizes of a stage mesh's axes, all prime, such that every layer's degrees are products of consecutive axes.

    Parameters
    ----------
    devices
        Devices of one stage.
    layers
        The layers of all stages: a stage's last layer hands over to the next stage's first on the same axes.

    Returns
    -------
    tuple of int
        Outermost axis first; its product is `devices`. One axis of size 1 where there is one device.

    Raises
    ------
    PlanError
        Two layers need groups of neighbouring devices of which neither size divides the other.
    """
    inner = {1: "", devices: ""}
    for layer in layers:
        inner.setdefault(layer.tensor_parallel, f"tensor-parallel {layer.tensor_parallel} of layer {layer.name}")
        group = layer.tensor_parallel * layer.shards
        inner.setdefault(group, f"groups of {group} devices that share the parameters of layer {layer.name}")
    axes: list[int] = []
    for smaller, larger in pairwise(sorted(inner)):
        if larger % smaller:
            raise PlanError(
                f"{inner[smaller]} and {inner[larger]} cannot lie on one mesh, because {smaller} does not divide "
                f"{larger}: choose degrees that divide one another"
            )
        axes.extend(prime_factors(larger // smaller))
    return tuple(reversed(axes)) or (1,)


def check_layer_plan(plan: LayerPlan) -> None:
    """Check degrees, devices, batch and schedule of a layer plan.

    Raises
    ------
    PlanError
        The first fault: sizes that do not divide, or settings that contradict each other.
    """
    stages = len(plan.stages)
    if all(stage.devices is None for stage in plan.stages):
        if plan.devices % stages:
            raise PlanError(
                f"{plan.devices} devices cannot be shared equally by {stages} stages: possible numbers of stages are "
                f"{_listed(divisors(plan.devices))}, or give every stage its devices"
            )
    elif any(stage.devices is None for stage in plan.stages) or sum(plan.stage_sizes) != plan.devices:
        raise PlanError(
            f"stages with {_listed(stage.devices or 'no' for stage in plan.stages)} devices are not all of the plan's "
            f"{plan.devices}: give every stage its devices, or none"
        )
    if plan.model.batch % plan.micro_batches:
        raise PlanError(
            f"a batch of {plan.model.batch} cannot be divided into {plan.micro_batches} micro-batches: possible are "
            f"{_listed(divisors(plan.model.batch))}"
        )
    if plan.schedule == "1f1b" and stages > 1 and plan.micro_batches < stages:
        raise PlanError(
            f"1F1B over {stages} stages needs at least {stages} micro-batches, the plan has {plan.micro_batches}: "
            "raise micro_batches or take the schedule gpipe"
        )
    names = [layer.name for layer in plan.layers]
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        raise PlanError(f"layer {repeated} is planned {names.count(repeated)} times: give every layer once")
    sizes = [size for stage, size in zip(plan.stages, plan.stage_sizes, strict=True) for _ in stage.layers]
    for layer, size in zip(plan.layers, sizes, strict=True):
        _check_degrees(layer, size, plan.model.batch // plan.micro_batches)
        _check_memory_settings(layer)
        broken = None if plan.record is None else broken_by(plan.record.pins, layer)
        if broken is not None:
            raise PlanError(f"layer {layer.name} does not keep the plan's pin {str(broken)!r}: plan again")
    if plan.is_even:
        stage_axes(plan.stage_sizes[0], plan.layers)
        return
    for stage, size in zip(plan.stages, plan.stage_sizes, strict=True):
        stage_axes(size, stage.layers)
    most = max(layer.data_parallel for layer in plan.layers)
    other = next((layer for layer in plan.layers if most % layer.data_parallel), None)
    if other is not None:
        raise PlanError(
            f"layer {other.name}: data-parallel {other.data_parallel} does not divide that of another stage, {most}: "
            "choose degrees that divide one another"
        )


def check_shared(plan: LayerPlan, names: Collection[str]) -> None:
    """Check that the layers of a shared parameter are in at most two stages, which then sum its gradients.

    Parameters
    ----------
    plan
        A plan.
    names
        Of layers that share one parameter.

    Raises
    ------
    PlanError
        They are in more stages.
    """
    holders = {
        number: layer.name for number, stage in enumerate(plan.stages) for layer in stage.layers if layer.name in names
    }
    if len(holders) > 2:
        raise PlanError(
            f"layers {_listed(holders.values())} share a parameter and are in {len(holders)} stages: two at most can "
            "share it, so put some of these layers into one stage, or untie them in the model's configuration"
        )
    if len({plan.stage_sizes[number] for number in holders}) > 1:
        raise PlanError(
            f"layers {_listed(holders.values())} share a parameter and are in stages with "
            f"{_listed(plan.stage_sizes[number] for number in holders)} devices: give these stages equally many, or "
            "untie the layers in the model's configuration"
        )


def _check_degrees(layer: LayerSettings, devices: int, rows: int) -> None:
    if layer.devices != devices:
        possible = [f"{devices // tensor} x {tensor}" for tensor in divisors(devices)]
        raise PlanError(
            f"layer {layer.name}: data-parallel {layer.data_parallel} x tensor-parallel {layer.tensor_parallel} is "
            f"{layer.devices}, its stage has {devices} devices: possible are {_listed(possible)}"
        )
    if rows % layer.data_parallel:
        raise PlanError(
            f"layer {layer.name}: a micro-batch of {rows} cannot be divided by data-parallel {layer.data_parallel}: "
            f"possible degrees are {_listed(sorted(set(divisors(rows)) & set(divisors(devices))))}, or change the batch"
        )
    if layer.shard_degree is not None:
        if layer.sharding == "none":
            raise PlanError(f"layer {layer.name}: shard_degree {layer.shard_degree} needs sharding zero2 or zero3")
        if layer.data_parallel % layer.shard_degree:
            raise PlanError(
                f"layer {layer.name}: shard_degree {layer.shard_degree} does not divide data-parallel "
                f"{layer.data_parallel}: possible are {_listed(divisors(layer.data_parallel))}"
            )
    if layer.sequence_parallel and not layer.shares_products:
        raise PlanError(f"layer {layer.name}: sequence_parallel needs tensor_parallel of at least 2, and not undivided")


def _check_memory_settings(layer: LayerSettings) -> None:
    if layer.sharded_slices is not None:
        if layer.sharding == "none":
            raise PlanError(f"layer {layer.name}: sharded_slices needs sharding zero2 or zero3")
        if layer.sharded_slices > layer.slices:
            raise PlanError(f"layer {layer.name}: {layer.sharded_slices} of {layer.slices} slices cannot be sharded")
    if layer.offload_parameters and layer.offload_optimizer:
        raise PlanError(
            f"layer {layer.name}: offload_parameters offloads the optimizer state as well: leave offload_optimizer out"
        )


def _listed(values: Iterable[object]) -> str:
    return ", ".join(map(str, values))
