"""Galvatron-BMW's whole problem: pipeline stages, strategies of all layers, batch and micro-batches.

A step over a batch ``B`` runs ``m`` micro-batches of ``B / m`` samples through ``P`` stages of ``N / P`` devices each.
With ``C_i`` the time of a stage for a micro-batch that synchronises gradients and ``C'_i`` for one that does not,
the step takes (Eq. 5 and 8)

    (m - 1) max_i C'_i + sum_i C_i

and the objective is the most samples per second, over all partitions of the layers into stages, all strategies within
the memory limit of every device, and all allowed ``P``, ``B`` and ``m``.

Under 1F1B stage ``i`` of ``P`` (from 0) holds the activations of ``min(m, P - i)`` micro-batches, under GPipe of ``m``;
without a pipeline a micro-batch ends before the next begins.

The paper has no layers that share a parameter. A parameter has one place on the devices, so in a plan that is to run,
such tied layers have one strategy: every search tries each that they may share. Gradients of a parameter are added up
between two stages at most, so all tied layers that are not in the first stage are in one other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache
from itertools import pairwise

import numpy as np

from formulations.galvatron.costs import CostModel, LayerTables, Restriction, layer_tables
from formulations.galvatron.stage import StageProblem
from formulations.galvatron.strategies import Dimension, decision_trees, pipeline_degrees
from formulations.layers.layer import LayerChain, tied_layers
from formulations.layers.pipeline_schedule import Schedule

__all__ = [
    "MicroBatchRule",
    "PipelinePlan",
    "PipelineProblem",
    "PlanCost",
    "SearchSpace",
    "balance_degree",
    "is_faster",
    "pipeline_problem",
    "renumbered",
]

Tables = Callable[[int, int], LayerTables]
"""From the number of stages and the samples of a micro-batch to the costs of all layers."""


class MicroBatchRule(StrEnum):
    """Rule of the numbers of micro-batches that are tried.

    The paper gives none. ``TWICE_THE_STAGES`` is our reading of its Figure 4: as many as divide the batch, at most
    twice the stages, and one without a pipeline. ``DIVISORS`` are all divisors of the batch.
    """

    TWICE_THE_STAGES = "twice the stages"
    DIVISORS = "divisors"

    def counts(self, batch: int, stages: int) -> tuple[int, ...]:
        """Return the numbers to try, in ascending order."""
        divisors = [m for m in range(1, batch + 1) if batch % m == 0]
        if self is MicroBatchRule.DIVISORS:
            return tuple(divisors)
        return (1,) if stages == 1 else (max(m for m in divisors if m <= 2 * stages),)


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """A plan for one step.

    Parameters
    ----------
    batch, micro_batches
        Samples of the step, and into how many parts they are divided.
    borders
        ``P + 1`` ascending layer numbers: stage ``i`` has the layers ``borders[i] .. borders[i + 1] - 1``.
    choices
        One strategy per layer, a column of the tables.
    """

    batch: int
    micro_batches: int
    borders: tuple[int, ...]
    choices: tuple[int, ...]

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.borders) - 1

    @property
    def partition(self) -> tuple[int, ...]:
        """Layers of every stage."""
        return tuple(end - first for first, end in pairwise(self.borders))


@dataclass(frozen=True, slots=True)
class PlanCost:
    """Time and memory of a plan, computed from the tables.

    Parameters
    ----------
    cost
        Quanta of a step.
    stage_costs, stage_repeated
        Quanta of a micro-batch per stage, with synchronisation and without.
    stage_peaks
        Bytes per stage.
    fits
        Whether every strategy is possible, tied layers have one and are in two stages at most, and every stage is
        within the limit.
    """

    cost: int
    stage_costs: tuple[int, ...]
    stage_repeated: tuple[int, ...]
    stage_peaks: tuple[int, ...]
    fits: bool


@dataclass(frozen=True, slots=True)
class PipelineProblem:
    """The joint problem of Galvatron-BMW.

    Parameters
    ----------
    layers
        Number of layers.
    tables
        Costs of all layers; the same layers are alike in all of them.
    degrees
        Numbers of stages that may be used; those above the number of layers are left out by every search.
    batches
        Batches that may be used, ascending.
    memory_limit
        Bytes on one device.
    schedule
        Schedule, which determines the micro-batches in flight.
    rule
        Numbers of micro-batches that may be used.
    tied
        Layers that need the same strategy, ascending; each of a kind of its own.
    """

    layers: int
    tables: Tables
    degrees: tuple[int, ...]
    batches: tuple[int, ...]
    memory_limit: int
    schedule: Schedule = Schedule.ONE_F_ONE_B
    rule: MicroBatchRule = MicroBatchRule.DIVISORS
    tied: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.batches or min(self.batches) < 1 or list(self.batches) != sorted(set(self.batches)):
            raise ValueError(f"batches are {self.batches}; give at least one, positive, ascending, each once")
        if not any(1 <= degree <= self.layers for degree in self.degrees):
            raise ValueError(
                f"pipelines of {self.degrees} stages for {self.layers} layers; every stage needs a layer, "
                f"so use at most {self.layers} stages"
            )

    @property
    def usable_degrees(self) -> tuple[int, ...]:
        """Numbers of stages that leave a layer for every stage."""
        return tuple(degree for degree in self.degrees if 1 <= degree <= self.layers)

    def shared_strategies(self, stages: int, micro_batch: int) -> tuple[int | None, ...]:
        """Strategies that all tied layers may have; None alone where no layers are tied."""
        if not self.tied:
            return (None,)
        tables = self.tables(stages, micro_batch)
        return tuple(np.flatnonzero(tables.allowed[tables.kinds[list(self.tied)]].all(axis=0)).tolist())

    def tables_with(self, stages: int, micro_batch: int, shared: int | None) -> LayerTables:
        """Return the tables where tied layers have this strategy alone; None leaves them free."""
        tables = self.tables(stages, micro_batch)
        return tables if shared is None else tables.with_strategy(self.tied, shared)

    def shared_in(self, borders: tuple[int, int], shared: int | None) -> int | None:
        """Return the strategy of tied layers where a stage has any, else None."""
        first, end = borders
        return shared if any(first <= layer < end for layer in self.tied) else None

    def may_be_stage(self, first: int, end: int) -> bool:
        """Whether the layers ``first .. end - 1`` may be a stage: behind the first one, with all tied layers or none.

        A stage that has tied layers, but not the last of them, would leave those to a third stage.
        """
        has_tied = any(first <= layer < end for layer in self.tied)
        return first == 0 or not has_tied or end > self.tied[-1]

    def stage(
        self,
        stages: int,
        position: int,
        borders: tuple[int, int],
        batch: int,
        micro_batches: int,
        shared: int | None = None,
    ) -> StageProblem:
        """Return the problem of one stage, its cost that of a micro-batch with synchronisation.

        Parameters
        ----------
        stages, position
            Number of stages, and which of them.
        borders
            Half-open range of layers.
        batch, micro_batches
            Samples of the step, and into how many parts they are divided.
        shared
            Strategy of tied layers; None leaves them free.
        """
        held = self.schedule.in_flight(stages, position, micro_batches)
        return self.tables_with(stages, batch // micro_batches, shared).stage(*borders, held, self.memory_limit)

    def evaluate(self, plan: PipelinePlan) -> PlanCost:
        """Compute time and memory of a plan."""
        pairs = list(pairwise(plan.borders))
        costs, repeated, peaks = [], [], []
        fits = len({plan.choices[layer] for layer in self.tied}) <= 1
        for position, (first, end) in enumerate(pairs):
            stage = self.stage(plan.stages, position, (first, end), plan.batch, plan.micro_batches)
            choices = plan.choices[first:end]
            costs.append(stage.cost_of(choices))
            repeated.append(stage.repeated_of(choices))
            peaks.append(stage.peak(choices))
            fits = fits and stage.is_feasible(choices) and self.may_be_stage(first, end)
        cost = (plan.micro_batches - 1) * max(repeated) + sum(costs)
        return PlanCost(cost, tuple(costs), tuple(repeated), tuple(peaks), fits)

    def samples_per_second(self, plan: PipelinePlan) -> float:
        """Compute the rate of a plan, with one second per quantum where the tables name no length."""
        tables = self.tables(plan.stages, plan.batch // plan.micro_batches)
        return plan.batch / (self.evaluate(plan).cost * (tables.seconds_per_cost or 1.0))


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The strategies of a search.

    Parameters
    ----------
    dimensions
        For layers; the paper's DP+TP has data and tensor, its DP+PP data alone.
    data_with_sharded
        Whether to keep what Takeaway 3 drops.
    checkpoint
        Whether layers may be checkpointed; the paper's Galvatron without -Base or -BMW does not.
    pipeline
        Whether there may be more than one stage.
    any_order
        Whether a dimension may be around any other, as in the paper; if not, they nest as `dimensions` are ordered, on
        one mesh of prime axes.
    tied_alike
        Whether layers that share a parameter need the same strategy, a case that the paper does not have.
    """

    dimensions: tuple[Dimension, ...] = tuple(Dimension)
    data_with_sharded: bool = True
    checkpoint: bool = True
    pipeline: bool = True
    any_order: bool = True
    tied_alike: bool = False


def pipeline_problem(
    chain: LayerChain,
    devices: int,
    memory_limit: int,
    batches: Sequence[int],
    model: CostModel,
    space: SearchSpace | None = None,
    schedule: Schedule = Schedule.ONE_F_ONE_B,
    rule: MicroBatchRule = MicroBatchRule.DIVISORS,
    restriction: Restriction | None = None,
) -> PipelineProblem:
    """Set up the problem of a model on a cluster.

    Parameters
    ----------
    chain
        Layers of the model.
    devices
        Number of devices.
    memory_limit
        Bytes on one device.
    batches
        Samples of a step that may be used, over all devices.
    model
        The estimator.
    space
        The strategies; all if None.
    schedule, rule
        As for :class:`PipelineProblem`.
    restriction
        What a user's decisions leave to layers; everything if None.

    Raises
    ------
    ValueError
        If there is no device or no batch.
    """
    allowed = space or SearchSpace()

    @cache
    def tables(stages: int, micro_batch: int) -> LayerTables:
        strategies = decision_trees(
            devices // stages,
            allowed.dimensions,
            data_with_sharded=allowed.data_with_sharded,
            checkpoint=allowed.checkpoint,
            any_order=allowed.any_order,
        )
        return layer_tables(chain, strategies, micro_batch, model, restriction)

    degrees = pipeline_degrees(devices) if allowed.pipeline else (1,)
    tied = tied_layers(chain) if allowed.tied_alike else ()
    return PipelineProblem(len(chain), tables, degrees, tuple(batches), memory_limit, schedule, rule, tied)


def renumbered(plan: PipelinePlan, before: PipelineProblem, after: PipelineProblem) -> PipelinePlan:
    """Name the strategies of a plan as another problem numbers them, which has all of them."""
    micro_batch = plan.batch // plan.micro_batches
    old = before.tables(plan.stages, micro_batch).strategies
    new = after.tables(plan.stages, micro_batch).strategies
    return replace(plan, choices=tuple(new.index(old[choice]) for choice in plan.choices))


def balance_degree(loads: Sequence[int]) -> float:
    """Balance of stages (Eq. 6): 1 less the share of the largest; at most ``1 - 1 / P``.

    A larger degree means a smaller largest share, not a smaller sum.

    Parameters
    ----------
    loads
        Time or memory of every stage, not all 0.
    """
    return 1 - max(loads) / sum(loads)


def is_faster(batch: int, cost: int, than_batch: int, than_cost: int) -> bool:
    """Whether one plan has more samples per quantum than another, in exact integers."""
    return batch * than_cost > than_batch * cost
