"""First choices of the joint search of Galvatron-BMW: stages, batch, micro-batches, strategy of tied layers.

With equal numbers in flight, more micro-batches of the same size are never slower per sample. So of the numbers that
fill the pipeline only the largest is searched. Where layers are tied, every strategy that they may share is a
combination of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from formulations.galvatron.costs import LayerTables
from formulations.galvatron.pipeline import PipelineProblem
from formulations.galvatron.windows import IMPOSSIBLE
from formulations.layers.pipeline_schedule import Schedule

__all__ = ["Combination", "combinations"]


@dataclass(frozen=True, slots=True)
class Combination:
    """Numbers that are fixed while the partition and strategies are decided, and the state of that search.

    Parameters
    ----------
    stages, batch, micro_batches
        The numbers.
    shared
        The strategy of tied layers, or None.
    bound
        Lower bound on the quanta per sample of its plans.
    steps
        Number of search steps so far.
    limit
        Longest micro-batch of the slowest stage in a plan within the gap of the best, or None.
    """

    stages: int
    batch: int
    micro_batches: int
    shared: int | None
    bound: Fraction
    steps: int = 0
    limit: int | None = None

    @property
    def micro_batch(self) -> int:
        """Samples of a micro-batch."""
        return self.batch // self.micro_batches


def combinations(problem: PipelineProblem) -> Iterator[Combination]:
    """All combinations that may have the best plan, each with a bound that leaves memory out."""
    chosen: dict[tuple[int, int, int], int] = {}
    for stages in problem.usable_degrees:
        for batch in problem.batches:
            for count in problem.rule.counts(batch, stages):
                key = (stages, batch // count, _distinct(problem.schedule, stages, count))
                chosen[key] = max(count, chosen.get(key, 0))
    for (stages, micro_batch, _), count in chosen.items():
        for shared in problem.shared_strategies(stages, micro_batch):
            tables = problem.tables_with(stages, micro_batch, shared)
            if tables.allowed[tables.kinds].any(axis=1).all():
                bound = _free_bound(tables, stages, micro_batch, count)
                yield Combination(stages, micro_batch * count, count, shared, bound)


def _distinct(schedule: Schedule, stages: int, count: int) -> int:
    """Equal for numbers of micro-batches of which only the largest counts."""
    if stages == 1:
        return 1
    return count if schedule is Schedule.GPIPE else min(count, stages)


def _free_bound(tables: LayerTables, stages: int, micro_batch: int, count: int) -> Fraction:
    """Quanta per sample without memory: the slowest stage takes at least its share and its slowest layer."""
    synchronised = np.where(tables.allowed, tables.synchronised, IMPOSSIBLE).min(axis=1)[tables.kinds]
    repeated = np.where(tables.allowed, tables.repeated, IMPOSSIBLE).min(axis=1)[tables.kinds]
    slowest = max(-(-int(repeated.sum()) // stages), int(repeated.max()))
    return Fraction((count - 1) * slowest + int(synchronised.sum()), micro_batch * count)
