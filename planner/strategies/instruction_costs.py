"""Prices of single instructions, for the replay of schedules.

The replay sums the costs of a schedule's instructions from their placements alone. It reads neither the tables
that the models were built from nor the layouts that a solver chose.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import ceil

import numpy as np

from formulations.problem.strategy_problem import IntArray
from planner.graph.operator_graph import OperatorGraph
from planner.graph.placement import Placement, local_numel, reordered
from planner.machine.cluster import HostCopies
from planner.machine.costs import CostModel, to_quanta
from planner.machine.known_costs import CostSource
from planner.machine.resharding import Step, step_between
from planner.replay.clocks import BucketCosts
from planner.replay.streams import WHOLE, Slowdowns
from planner.replay.structure import strategy_of
from planner.schedule.instructions import Compute, Instruction, Reshard, Schedule, Update, buckets
from planner.strategies.sharding_rules import Strategy

PICOSECONDS = 10**12
"""Paths are added up in whole picoseconds, as :class:`planner.machine.resharding.ReshardPlanner` does."""


@dataclass(frozen=True, slots=True)
class CostPart:
    """A part of an instruction's cost: kind and signature among measured costs, seconds by the cluster's rates."""

    kind: str
    signature: str
    modelled: float


class InstructionCosts:
    """Costs in nanoseconds of the instructions of a schedule.

    Parameters
    ----------
    graph
        The traced step.
    costs
        Cost model of the cluster on the schedule's mesh.
    strategies
        Strategies of every operator by index: the collectives inside an operator are found by placements.
    optimizer
        Name of the optimizer.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        costs: CostModel,
        strategies: dict[int, tuple[Strategy, ...]],
        optimizer: str,
    ) -> None:
        self._graph = graph
        self._costs = costs
        self._strategies = strategies
        self._optimizer = optimizer
        self._known: dict[tuple[object, ...], int] = {}
        """Of executions, paths and updates: plans are replayed many times."""
        self._flat_steps: dict[tuple[object, ...], tuple[Step, tuple[int, int]]] = {}

    def compute_quanta(
        self, operator: int, outputs: tuple[Placement | None, ...], inputs: tuple[Placement, ...]
    ) -> int:
        """Cost of one execution; KeyError where the operator has no such strategy."""
        key = operator, outputs, inputs
        if key not in self._known:
            strategy = self._strategy(operator, outputs, inputs)
            seconds = self._costs.operator_seconds(self._graph, self._graph.operators[operator], (strategy,))
            self._known[key] = int(to_quanta(seconds)[0])
        return self._known[key]

    def _strategy(
        self, operator: int, outputs: tuple[Placement | None, ...], inputs: tuple[Placement, ...]
    ) -> Strategy:
        for strategy in self._strategies[operator]:
            if strategy.outputs == outputs and strategy.inputs == inputs:
                return strategy
        raise KeyError(operator)

    def reshard_quanta(self, value: int, path: tuple[Placement, ...], in_place: bool) -> int:
        """Cost of a path of single collectives; ``in_place`` if the first may change the source."""
        key = "path", value, path, in_place
        if key not in self._known:
            self._known[key] = self._path_quanta(value, path, in_place)
        return self._known[key]

    def _path_quanta(self, value: int, path: tuple[Placement, ...], in_place: bool) -> int:
        spec = self._graph.values[value].spec
        order = spec.memory_order
        shape = tuple(spec.shape[dim] for dim in order)
        lying = [reordered(placement, order) for placement in path]
        resharding = self._costs.resharding
        try:
            ticks = sum(
                round(
                    resharding.step_seconds(shape, spec.item_bytes, before, after, owned=in_place or at > 0)
                    * PICOSECONDS
                )
                for at, (before, after) in enumerate(pairwise(lying))
            )
        except ValueError as error:
            raise KeyError(path) from error
        return int(to_quanta(ticks / PICOSECONDS))

    def bucket_quanta(self, parts: Sequence[tuple[int, tuple[Placement, ...]]]) -> BucketCosts:
        """Costs of a bucket; each part has the share of its bytes in the collective."""
        resharding = self._costs.resharding
        step, sizes = self._flat(parts)
        before, after = (sum(column) for column in zip(*sizes, strict=True))
        total = int(to_quanta(resharding.flat_seconds(step, before, after)))
        ends = [total * int(reached) // before for reached in np.cumsum([sent for sent, _ in sizes])]
        packed, unpacked = (int(to_quanta(resharding.copy_seconds(nbytes))) for nbytes in (before, after))
        return BucketCosts(tuple(end - begin for begin, end in pairwise([0, *ends])), packed, unpacked)

    def _flat(self, parts: Sequence[tuple[int, tuple[Placement, ...]]]) -> tuple[Step, list[tuple[int, int]]]:
        """The collective of a bucket, and bytes of each part before and after it."""
        found = [self._flat_step(value, path) for value, path in parts]
        return found[0][0], [sizes for _, sizes in found]

    def _flat_step(self, value: int, path: tuple[Placement, ...]) -> tuple[Step, tuple[int, int]]:
        """The collective of a part, and its bytes before and after."""
        key = value, path
        if key not in self._flat_steps:
            spec, mesh = self._graph.values[value].spec, self._costs.mesh
            step = step_between(*path)
            if step is None or step.collective is None:
                raise KeyError(path)
            before, after = (local_numel(spec.shape, at, mesh) * spec.item_bytes for at in path)
            self._flat_steps[key] = step, (before, after)
        return self._flat_steps[key]

    def parts(self, schedule: Schedule, instruction: Instruction) -> tuple[CostPart, ...]:
        """Parts of an instruction's cost that may be measured: itself, or the steps of a path; none of a view or copy.

        Raises
        ------
        KeyError
            The operator has no such strategy.
        """
        costs, buffers = self._costs, schedule.buffers
        match instruction:
            case Compute(index) if not self._graph.operators[index].is_view:
                operator = self._graph.operators[index]
                strategy = self._strategy(index, *strategy_of(schedule, instruction))
                signature = costs.operator_signature(self._graph, operator, strategy)
                modelled = costs.modelled_operator_seconds(self._graph, operator, strategy)
                return (CostPart(operator.target, signature, modelled),)
            case Reshard(source, _, path, in_place=in_place):
                spec = self._graph.values[buffers[source].value].spec
                shape = tuple(spec.shape[dim] for dim in spec.memory_order)
                lying = [reordered(placement, spec.memory_order) for placement in path]
                return tuple(
                    self._step_part(shape, spec.item_bytes, before, after, owned=in_place or at > 0)
                    for at, (before, after) in enumerate(pairwise(lying))
                )
            case Update(parameter):
                spec = self._graph.values[buffers[parameter].value].spec
                numel = local_numel(spec.shape, buffers[parameter].placement, costs.mesh)
                gradient = self._graph.gradient_dtypes[buffers[parameter].value]
                modelled = costs.modelled_update_seconds(numel, spec.dtype, gradient, self._optimizer)
                return (CostPart(self._optimizer, costs.update_signature(numel, spec.dtype, gradient), modelled),)
        return ()

    def _step_part(
        self, shape: tuple[int, ...], item_bytes: int, before: Placement, after: Placement, *, owned: bool
    ) -> CostPart:
        resharding, known = self._costs.resharding, self._costs.known
        kind, signature = resharding.step_signature(known, shape, item_bytes, before, after, owned=owned)
        seconds = resharding.modelled_step_seconds(shape, item_bytes, before, after, owned=owned)
        return CostPart(kind, signature, seconds)

    def seconds_by_source(self, schedule: Schedule) -> dict[CostSource, float]:
        """Seconds of a step by how their costs are known; copies between device and host are not among them."""
        known = self._costs.known
        total = dict.fromkeys(CostSource, 0.0)
        joined = buckets(schedule.instructions)
        parts = [part for entries in joined.values() for part in self._bucket_parts(schedule, entries)]
        bucketed = {at for bucket in joined for at in bucket}
        for at, instruction in enumerate(schedule.instructions):
            parts += () if at in bucketed else self.parts(schedule, instruction)
        for part in parts:
            seconds = known.seconds(part.kind, part.signature, part.modelled)
            total[known.source(part.kind, part.signature)] += seconds
        return total

    def _bucket_parts(self, schedule: Schedule, entries: Sequence[Reshard]) -> Iterator[CostPart]:
        """Parts of a bucket's cost: its collective, and the copies into and out of its flat buffers."""
        resharding = self._costs.resharding
        step, sizes = self._flat([(schedule.buffers[part.source].value, part.path) for part in entries])
        before, after = (sum(column) for column in zip(*sizes, strict=True))
        yield CostPart(*resharding.flat_part(step, before, after))
        copies = resharding.copy_seconds(before) + resharding.copy_seconds(after)
        yield CostPart("copies of a bucket", "", copies)

    def update_quanta(self, parameter: int, placement: Placement) -> int:
        """Cost of the optimizer's update of one parameter."""
        key = "update", parameter, placement
        if key not in self._known:
            value = self._graph.values[parameter]
            numel = local_numel(value.spec.shape, placement, self._costs.mesh)
            gradient = self._graph.gradient_dtypes[parameter]
            seconds = self._costs.update_seconds(numel, value.spec.dtype, gradient, self._optimizer)
            self._known[key] = int(to_quanta(seconds))
        return self._known[key]

    @property
    def host_copies(self) -> HostCopies:
        """Concurrency of copies between device and host on this cluster."""
        return self._costs.host_copies

    @property
    def slowdowns(self) -> Slowdowns:
        """Slowdowns of the computation and of overlapped collectives beside each other."""
        overlap = self._costs.overlap
        return Slowdowns(ceil(WHOLE * overlap.computation), ceil(WHOLE * overlap.collectives))

    def transfer_quanta(self, value: int, placement: Placement, outward: bool) -> int:
        """Cost of one copy between device and host; both directions of a link have the same speed."""
        del outward
        spec = self._graph.values[value].spec
        nbytes = local_numel(spec.shape, placement, self._costs.mesh) * spec.item_bytes
        return int(self.copy_quanta(np.array(nbytes)))

    def copy_quanta(self, nbytes: IntArray) -> IntArray:
        """Cost of one copy of so many bytes between device and host, elementwise."""
        link = self._costs.host_link
        return to_quanta(link.latency_seconds + nbytes / link.bandwidth)
