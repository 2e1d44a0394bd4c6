"""Settings of the layer executor for a strategy of a layer."""

from __future__ import annotations

from formulations.galvatron.strategies import Dimension, LayerStrategy
from formulations.layers.layer import LayerProfile
from planner.layers.plan.document import LayerSettings


def strategy_settings(layer: LayerProfile, strategy: LayerStrategy) -> LayerSettings:
    """Settings of the layer executor for a strategy of a layer."""
    shards = strategy.degree(Dimension.SHARDED)
    return LayerSettings(
        name=layer.name,
        data_parallel=strategy.sample_parts,
        sharding="zero3" if shards > 1 else "none",
        shard_degree=shards if shards > 1 else None,
        tensor_parallel=strategy.degree(Dimension.TENSOR),
        undivided=layer.split.divisor == 0,
        checkpoint=strategy.checkpoint,
    )
