"""Random layer plans that torch's functions for modules can express: degrees alike, everything else drawn."""

from __future__ import annotations

from random import Random
from typing import Any

from support.layers.layer_random import HEADS, PARTS
from support.layers.layer_runs import names_of, planned_model

from planner.layers.plan.check import check_layer_plan, divisors
from planner.layers.plan.document import LayerPlan, LayerSettings, StagePlan

DIVIDED = ("llama", "bert", "vit")
"""Families whose modules are divided as they are."""

AROUND = ("embedding", "bridge", "head")


def exportable_plan(name: str, devices: int, seed: int) -> LayerPlan:
    """A plan of a family for some devices; the seed says the rest."""
    random = Random(f"exported {name} {devices} {seed}")
    model = planned_model(name)
    names = names_of(model)
    possible = [size for size in divisors(devices) if name in DIVIDED and size <= HEADS.get(name, 4)] or [1]
    tensor = random.choice(possible)
    data = devices // tensor
    micro_batches = random.choice([parts for parts in (1, 2) if model.batch // parts % data == 0])
    sequence_parallel = tensor > 1 and name != "vit" and random.random() < 0.5
    whole = random.random() < 0.5  # around the blocks, every device computes all
    ends: dict[str, Any] | None = None
    layers = []
    for unit in names:
        shared: dict[str, Any] = {"data_parallel": data, "tensor_parallel": tensor}
        place = _place(random, data)
        if unit in AROUND:
            ends = place if ends is None else ends  # the first and the last layer share the table of tokens
            layers.append(LayerSettings(name=unit, **shared, **ends, undivided=whole and tensor > 1))
            continue
        shared["sequence_parallel"] = sequence_parallel
        parts = next((found for start, found in PARTS[name].items() if unit.startswith(start)), ())
        inside = [unit] if random.random() < 0.5 else [f"{unit}.{part}" for part in parts]
        layers += [LayerSettings(name=each, **shared, **_place(random, data), **_kept(random)) for each in inside]
    plan = LayerPlan(
        model=model,
        devices=devices,
        stages=(StagePlan(layers=tuple(layers)),),
        micro_batches=micro_batches,
        optimizer=random.choice(["adamw", "sgd", "sgd_momentum"]),
    )
    check_layer_plan(plan)
    return plan


def _place(random: Random, data: int) -> dict[str, Any]:
    sharding = random.choice(["none", "zero2", "zero3"])
    degree = random.choice([size for size in divisors(data) if size > 1] or [None])
    offload = random.random() < 0.2
    return {
        "sharding": sharding,
        "shard_degree": degree if sharding != "none" else None,
        "offload_parameters": offload,
    }


def _kept(random: Random) -> dict[str, bool]:
    return {"checkpoint": random.random() < 0.4, "offload_hidden": random.random() < 0.3}
