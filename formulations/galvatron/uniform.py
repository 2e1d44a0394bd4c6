"""Uniform strategies as restrictions of Galvatron-BMW's problem: the baselines of the papers' tables.

A baseline fixes the number of stages and leaves every layer the same one strategy, or few. What remains, where the
layers are cut into stages, the batch, micro-batches within the rule, is solved exactly, so a baseline is as good as it
can be under the same costs; and it is a plan of the whole problem, which is therefore never slower.

==============  ======================================================================================
``ddp``         replicas on all devices (PyTorch DDP)
``fsdp``        shards on all devices (FairScale's FSDP, ZeRO-3, the paper's SDP)
``tp``          tensor parallelism on all devices (Megatron-LM)
``gpipe``       as many stages as devices, all micro-batches forward first
``1f1b``        the same, with forward and backward in turns
``3d``          two stages, tensor parallelism of degree two inside, replicas around it (DeepSpeed 3D)
==============  ======================================================================================

DeepSpeed 3D has 2 x 2 x 2 on eight devices in the papers. On more the degrees are not given; here stages and tensor
parallelism stay at two, as in the suggestion that the paper cites, and replicas fill the devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

from formulations.galvatron.costs import CostModel, LayerTables, layer_tables
from formulations.galvatron.pipeline import MicroBatchRule, PipelineProblem
from formulations.galvatron.strategies import Dimension, LayerStrategy, Level
from formulations.layers.layer import LayerChain
from formulations.layers.pipeline_schedule import Schedule

__all__ = ["UniformStrategy", "baselines", "three_dimensions", "uniform_problem", "with_any_degree"]


@dataclass(frozen=True, slots=True)
class UniformStrategy:
    """Stages and the strategies that every layer may have.

    Parameters
    ----------
    stages
        Number of stages.
    strategies
        One, or a few of which each layer has one.
    schedule
        Of the pipeline.
    """

    stages: int
    strategies: tuple[LayerStrategy, ...]
    schedule: Schedule = Schedule.ONE_F_ONE_B


def baselines(devices: int) -> dict[str, UniformStrategy]:
    """Baselines by name on a number of devices; ``3d`` only where they are divisible by four."""
    data, sharded, tensor = (
        (LayerStrategy((Level(dimension, devices),), checkpoint=False),)
        for dimension in (Dimension.DATA, Dimension.SHARDED, Dimension.TENSOR)
    )
    one = (LayerStrategy((), checkpoint=False),)
    found = {
        "ddp": UniformStrategy(1, data),
        "fsdp": UniformStrategy(1, sharded),
        "tp": UniformStrategy(1, tensor),
        "gpipe": UniformStrategy(devices, one, Schedule.GPIPE),
        "1f1b": UniformStrategy(devices, one),
    }
    if devices % 4 == 0:
        found["3d"] = three_dimensions(2, devices // 4, 2, (Dimension.DATA,))
    return found


def three_dimensions(
    stages: int, data: int, tensor: int, kinds: Sequence[Dimension], *, checkpoint: bool = False
) -> UniformStrategy:
    """Pipeline, data and tensor parallelism of fixed degrees; tensor parallelism is innermost.

    Parameters
    ----------
    stages, data, tensor
        Degrees; 1 leaves a dimension out.
    kinds
        Kinds of data parallelism of which each layer has one: replicas (DeepSpeed 3D), or shards too (3D+OSDP).
    checkpoint
        Whether every layer is checkpointed.
    """

    def strategy(kind: Dimension) -> LayerStrategy:
        levels = (Level(kind, data), Level(Dimension.TENSOR, tensor))
        return LayerStrategy(tuple(level for level in levels if level.degree > 1), checkpoint)

    return UniformStrategy(stages, tuple(dict.fromkeys(map(strategy, kinds))))


def uniform_problem(
    chain: LayerChain,
    memory_limit: int,
    batches: Sequence[int],
    model: CostModel,
    uniform: UniformStrategy,
    rule: MicroBatchRule = MicroBatchRule.DIVISORS,
) -> PipelineProblem:
    """Set up the problem that a baseline leaves.

    Parameters
    ----------
    chain, memory_limit, batches, model, rule
        As for :func:`formulations.galvatron.pipeline.pipeline_problem`.
    uniform
        The baseline.

    Raises
    ------
    ValueError
        If there are more stages than layers, or no batch.
    """

    @cache
    def tables(stages: int, micro_batch: int) -> LayerTables:
        del stages  # there is one number of stages
        return layer_tables(chain, uniform.strategies, micro_batch, model)

    return PipelineProblem(
        len(chain), tables, (uniform.stages,), tuple(batches), memory_limit, uniform.schedule, rule
    )


def with_any_degree(chain: LayerChain, degree: int) -> LayerChain:
    """The same layers where tensor parallelism of this degree, and of its divisors, is possible.

    Papers that do not print the number of heads have rows with tensor parallelism of degree 8 and 16, which heads of 64
    do not allow (1280 / 64 = 20). A multiple of the degree is the number that these rows imply.
    """
    return replace(
        chain,
        layers=tuple(
            replace(layer, split=replace(layer.split, divisor=layer.split.divisor * degree))
            for layer in chain.layers
        ),
    )
