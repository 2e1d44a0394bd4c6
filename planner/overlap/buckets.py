"""Transfers that share their collectives: which ones, and what the steps of a bucket take.

A bucket has the latency of one collective, and copies into and out of its flat buffers. Its gathers are there when the
first of them is needed, and its reductions start when the last gradient is made: so it holds more memory, and waits.
Transfers are taken into a bucket in the order of their time, within a *span* of the computation, where they gain by it:
time on the link, which counts for a part, as it may be hidden, and copies, which hold the computation up.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from planner.graph.operator_graph import OperatorGraph
from planner.graph.placement import is_shard
from planner.machine.resharding import BUCKETED, step_between
from planner.overlap.transfers import Transfer, single_steps
from planner.replay.clocks import StepCosts
from planner.schedule.instructions import Buffer, Reshard, Schedule


@dataclass(frozen=True, slots=True)
class TransferStep:
    """A collective of one transfer or of a bucket, or a local slice.

    Parameters
    ----------
    parts
        Its instructions.
    quanta
        Time of the collective or slice.
    packed, unpacked
        Time of copies into and out of flat buffers.
    """

    parts: tuple[Reshard, ...]
    quanta: int
    packed: int = 0
    unpacked: int = 0

    @property
    def total(self) -> int:
        """Time of all."""
        return self.quanta + self.packed + self.unpacked


@dataclass(frozen=True, slots=True)
class BucketRule:
    """Which transfers share their collectives.

    Parameters
    ----------
    span
        Part of the computation in which those of one bucket are needed, or made; 0 for no buckets.
    exposed
        Part of the time on links that counts beside copies.
    """

    span: float
    exposed: float = 1.0


@dataclass(frozen=True, slots=True)
class Bucket:
    """Transfers with the steps that they have in common; often a single one."""

    transfers: tuple[Transfer, ...]
    steps: tuple[TransferStep, ...]

    def cost(self, exposed: float) -> float:
        """Time of all steps, of that on links a part."""
        return sum(exposed * step.quanta + step.packed + step.unpacked for step in self.steps)


class Grouping:
    """Makes buckets of transfers.

    Parameters
    ----------
    graph, schedule
        The step and its schedule without overlap.
    costs
        Prices of instructions.
    transfers
        Its transfers.
    when
        Time of the computation by position.
    """

    def __init__(
        self,
        graph: OperatorGraph,
        schedule: Schedule,
        costs: StepCosts,
        transfers: Sequence[Transfer],
        when: Callable[[int], int],
    ) -> None:
        self._graph, self._schedule, self._costs, self._when = graph, schedule, costs, when
        self.buffers = list(schedule.buffers)
        """Those of the schedule, and between steps."""
        self._singles = [self._single(transfer) for transfer in transfers]

    def of(self, rule: BucketRule, computation: int) -> list[Bucket]:
        """Buckets by a rule, of a step whose computation takes so many quanta."""
        if not rule.span:
            return self._singles
        span = int(rule.span * computation)
        alike: dict[Hashable, list[Bucket]] = defaultdict(list)
        for single in self._singles:
            alike[self._kind(single)].append(single)
        apart = alike.pop(None, [])
        return [*apart, *(bucket for members in alike.values() for bucket in self._merged(members, span, rule.exposed))]

    def _single(self, transfer: Transfer) -> Bucket:
        reshard = self._schedule.instructions[transfer.reshard]
        assert isinstance(reshard, Reshard)
        steps = single_steps(reshard, len(self.buffers), transfer.owns_source)
        value = self.buffers[reshard.source].value
        self.buffers += [Buffer(value, step.path[1]) for step in steps[:-1]]
        priced = (TransferStep((step,), self._costs.reshard_quanta(value, step.path, step.in_place)) for step in steps)
        return Bucket((transfer,), tuple(priced))

    def _kind(self, single: Bucket) -> Hashable:
        """What the transfers of a bucket have in common; None for one that cannot share its collectives."""
        (transfer,) = single.transfers
        kinds = []
        for step in single.steps:
            (part,) = step.parts
            found = step_between(*part.path)
            if found is None or found.collective not in BUCKETED:
                return None
            old = part.path[0][found.axis]
            kinds.append((found.axis, found.collective, "S" if is_shard(old) else old))
        dtype = self._graph.values[self.buffers[single.steps[0].parts[0].source].value].spec.dtype
        return transfer.is_gather, dtype, tuple(kinds)

    def _merged(self, members: Sequence[Bucket], span: int, exposed: float) -> list[Bucket]:
        """Buckets of transfers of one kind."""
        found: list[Bucket] = []
        taken: list[Bucket] = []
        bucket: Bucket | None = None
        for single in sorted(members, key=self._time):
            if bucket is not None and self._time(single) - self._time(taken[0]) <= span:
                joined = self._joined([*taken, single])
                if joined.cost(exposed) < bucket.cost(exposed) + single.cost(exposed):
                    taken, bucket = [*taken, single], joined
                else:
                    found.append(single)
                continue
            found += _better(bucket, taken, exposed)
            taken, bucket = [single], self._joined([single])
        return [*found, *_better(bucket, taken, exposed)]

    def _time(self, single: Bucket) -> int:
        (transfer,) = single.transfers
        return self._when(transfer.needed if transfer.is_gather else transfer.reshard)

    def _joined(self, singles: Sequence[Bucket]) -> Bucket:
        steps = []
        for alike in zip(*(single.steps for single in singles), strict=True):
            (first, *more) = (part for step in alike for part in step.parts)
            parts = (replace(first, in_place=False), *(replace(part, joined=True, in_place=False) for part in more))
            costs = self._costs.bucket_quanta([(self.buffers[part.source].value, part.path) for part in parts])
            steps.append(TransferStep(parts, sum(costs.links), costs.packed, costs.unpacked))
        return Bucket(tuple(transfer for single in singles for transfer in single.transfers), tuple(steps))


def _better(bucket: Bucket | None, taken: list[Bucket], exposed: float) -> list[Bucket]:
    """A bucket, or its transfers where they take less."""
    apart = sum(single.cost(exposed) for single in taken)
    return taken if bucket is None or apart <= bucket.cost(exposed) else [bucket]
