"""Random layer plans of small models, every setting drawn for every layer."""

from __future__ import annotations

from itertools import pairwise
from random import Random
from typing import Any

from support.layers.layer_plan_models import SEQUENCE
from support.layers.layer_runs import names_of, planned_model

from planner.layers.plan.check import check_layer_plan, divisors
from planner.layers.plan.document import LayerPlan, LayerSettings, StagePlan

PARTS = {
    "gpt2": {"": ("attention", "mlp")},
    "llama": {"": ("self_attn", "mlp")},
    "bert": {"": ("attention", "mlp")},
    "vit": {"": ("attention", "mlp")},
    "t5": {"encoder": ("attention", "mlp"), "decoder": ("layer.0", "layer.1", "layer.2")},
}
"""Modules of a block that are layers of their own, by role or path, and by the beginning of the block's name."""

HEADS = {"llama": 2}
"""Heads that tensor parallelism divides, where they are fewer than devices."""

PLACE = (
    "data_parallel",
    "sharding",
    "shard_degree",
    "tensor_parallel",
    "undivided",
    "offload_parameters",
    "offload_optimizer",
)
"""Settings that layers with a common parameter have in common."""

ALIKE = ("data_parallel", "tensor_parallel", "undivided", "sequence_parallel")
"""Settings that the parts of a block have in common."""


def random_layer_plan(name: str, devices: int, seed: int) -> LayerPlan:
    """A plan of a family for some devices; the seed says the rest."""
    random = Random(f"{name} {devices} {seed}")
    model = planned_model(name, random.choice([2, 2, 3, 4]) if name != "t5" else 2)
    names = names_of(model)
    stages = random.choice([size for size in divisors(devices) if size <= len(names)])
    stage_devices = devices // stages
    schedule = random.choice(["gpipe", "1f1b"])
    possible = [
        parts
        for parts in divisors(model.batch)
        if model.batch // parts >= 2 and (schedule == "gpipe" or stages == 1 or parts >= stages)
    ]
    micro_batches = random.choice(possible)
    rows = model.batch // micro_batches
    layers: list[list[LayerSettings]] = []
    ends: LayerSettings | None = None
    for unit in names:
        is_block = unit not in ("embedding", "bridge", "head")
        whole = _settings(random, unit, stage_devices, rows, HEADS.get(name, 4) if is_block else 0, name != "vit")
        if unit in ("embedding", "head"):
            # The first and the last layer share the table of tokens.
            ends = ends or whole
            whole = whole.model_copy(update={field: getattr(ends, field) for field in PLACE})
        parts = next((found for start, found in PARTS[name].items() if unit.startswith(start)), ())
        if not is_block or random.random() < 0.6:
            layers.append([whole])
            continue
        layers.append([_part(random, whole, f"{unit}.{part}") for part in parts])
    cuts = [0, *sorted(random.sample(range(1, len(names)), stages - 1)), len(names)]
    plan = LayerPlan(
        model=model,
        devices=devices,
        stages=tuple(
            StagePlan(layers=tuple(layer for unit in layers[start:end] for layer in unit))
            for start, end in pairwise(cuts)
        ),
        micro_batches=micro_batches,
        schedule=schedule,
        optimizer=random.choice(["adamw", "sgd", "sgd_momentum"]),
    )
    check_layer_plan(plan)
    return plan


def _settings(
    random: Random, name: str, devices: int, rows: int, heads: int, may_share_sequences: bool
) -> LayerSettings:
    """Settings of a block, or of what has no heads."""
    possible = [degree for degree in divisors(devices) if rows % (devices // degree) == 0]
    tensor = random.choice([possible[0], *possible])  # hybrid sharding needs many data-parallel devices
    data = devices // tensor
    undivided = tensor > 1 and (heads % tensor > 0 or random.random() < 0.2)
    chosen: dict[str, Any] = {"name": name, "data_parallel": data, "tensor_parallel": tensor, "undivided": undivided}
    divided = tensor > 1 and not undivided
    if heads and may_share_sequences and divided and SEQUENCE % tensor == 0:
        chosen["sequence_parallel"] = random.random() < 0.5
    return LayerSettings(**chosen, **_memory(random, data, divided, heads > 0))


def _part(random: Random, whole: LayerSettings, name: str) -> LayerSettings:
    kept = {key: getattr(whole, key) for key in ALIKE}
    return LayerSettings(name=name, **kept, **_memory(random, whole.data_parallel, whole.shares_products, True))


def _memory(random: Random, data: int, divided: bool, is_block: bool) -> dict[str, Any]:
    sharding = random.choice(["none", "zero2", "zero3", "zero3"])
    chosen: dict[str, Any] = {
        "sharding": sharding,
        "checkpoint": random.random() < 0.4,
        "offload_hidden": random.random() < 0.3,
        "offload_parameters": random.random() < 0.2,
        "slices": random.choice([1, 1, 2, 4]) if is_block else 1,
    }
    chosen["offload_optimizer"] = not chosen["offload_parameters"] and random.random() < 0.3
    if sharding != "none":
        chosen["shard_degree"] = random.choice([None, *divisors(data)[1:]])
        if not divided and chosen["slices"] > 1:
            chosen["sharded_slices"] = random.choice([None, *range(chosen["slices"] + 1)])
    return chosen
