"""Uniform strategies as restrictions of Galvatron-BMW's problem: the baselines of the papers' tables.

A baseline fixes the number of stages and leaves every layer the same one strategy, or few. What remains, where the
layers are cut into stages, the batch, micro-batches within the rule, is solved exactly, so a baseline is as good as it
can be under the same costs; and it is a plan of the whole problem, which is therefore never slower.

With one strategy the sum over stages in the time of a step, ``(m - 1) max_i C'_i + sum_i C_i``, is the same for all
partitions. So the best one has the least slowest stage among those that fit: :func:`solve_uniform` needs no search.

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
from fractions import Fraction
from functools import cache
from itertools import product

import numpy as np

from formulations.galvatron.best_partition import best_partition
from formulations.galvatron.costs import CostModel, LayerTables, layer_tables
from formulations.galvatron.joint import JointResult
from formulations.galvatron.pipeline import MicroBatchRule, PipelinePlan, PipelineProblem
from formulations.galvatron.strategies import Dimension, LayerStrategy, Level
from formulations.galvatron.windows import IMPOSSIBLE
from formulations.layers.layer import LayerChain
from formulations.layers.pipeline_schedule import Schedule
from formulations.problem.strategy_problem import IntArray

__all__ = ["UniformStrategy", "baselines", "solve_uniform", "three_dimensions", "uniform_problem", "with_any_degree"]


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

    return PipelineProblem(len(chain), tables, (uniform.stages,), tuple(batches), memory_limit, uniform.schedule, rule)


def solve_uniform(problem: PipelineProblem) -> JointResult:
    """Find the partition, batch and micro-batches with most samples per second where every layer has one strategy.

    Parameters
    ----------
    problem
        Of :func:`uniform_problem` with one strategy; its bound is exact.

    Raises
    ------
    ValueError
        If there is a choice of strategies.
    """
    best: tuple[Fraction, int, PipelinePlan] | None = None
    for stages, batch in product(problem.usable_degrees, problem.batches):
        for count in problem.rule.counts(batch, stages):
            tables = problem.tables(stages, batch // count)
            if len(tables.strategies) != 1:
                raise ValueError(f"{len(tables.strategies)} strategies; a uniform plan has one, use the joint search")
            if not tables.allowed[tables.kinds].all():
                continue
            held = [problem.schedule.in_flight(stages, position, count) for position in range(stages)]
            windows = {k: _slowest_within(tables, k, problem.memory_limit) for k in set(held)}
            slowest, borders = best_partition(np.stack([windows[k] for k in held]), np.maximum)
            if slowest >= IMPOSSIBLE:
                continue
            cost = (count - 1) * slowest + int(tables.synchronised[tables.kinds, 0].sum())
            per_sample = Fraction(cost, batch)
            if best is None or per_sample < best[0]:
                best = per_sample, cost, PipelinePlan(batch, count, borders, (0,) * problem.layers)
    return JointResult(None, None, None, 0) if best is None else JointResult(best[2], best[1], best[0], 0)


def _slowest_within(tables: LayerTables, in_flight: int, memory_limit: int) -> IntArray:
    """Time of a micro-batch without synchronisation of every run of layers, where it fits; shape ``(L + 1, L + 1)``."""
    rows = tables.kinds
    forward, backward, states, borrowed, repeated = (
        table[rows, 0] for table in (tables.forward, tables.backward, tables.states, tables.borrowed, tables.repeated)
    )
    layers = len(rows)
    found = np.full((layers + 1, layers + 1), IMPOSSIBLE, dtype=np.int64)
    for first in range(layers):
        held = np.maximum.accumulate(in_flight * np.cumsum(forward[first:]) + backward[first:])
        held = held + np.cumsum(states[first:])
        if first > 0:  # layers before the first lend nothing to this stage
            held = held + np.maximum.accumulate(borrowed[first:])
        found[first, first + 1 :] = np.where(held <= memory_limit, np.cumsum(repeated[first:]), IMPOSSIBLE)
    return found


def with_any_degree(chain: LayerChain, degree: int) -> LayerChain:
    """The same layers where tensor parallelism of this degree, and of its divisors, is possible.

    Papers that do not print the number of heads have rows with tensor parallelism of degree 8 and 16, which heads of 64
    do not allow (1280 / 64 = 20). A multiple of the degree is the number that these rows imply.
    """
    return replace(
        chain,
        layers=tuple(
            replace(layer, split=replace(layer.split, divisor=layer.split.divisor * degree)) for layer in chain.layers
        ),
    )
