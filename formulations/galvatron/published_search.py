"""Galvatron-BMW's own searches over pipelines: Algorithm 1 (Base) and Algorithm 2 (BMW), as printed or repaired.

Both go through batches and numbers of stages and search every stage by :mod:`formulations.galvatron.dynamic_program`.
Base takes one partition per number of stages, the time-balanced one (as a cell that Tables III and IV share suggests).
BMW begins with the memory-balanced partition (repaired, ``ALG2_START``, with the time-balanced one too) and moves
boundary layers out of the slowest stage, as long as no stage gets slower than the slowest was, none exceeds the memory
limit, and none holds more than the fullest stage of the time-balanced partition would. The initial strategy of all
layers is the first that is possible, data parallelism where the micro-batch can be divided (the paper leaves it open).

Both may be given a time limit, which the paper does not have; the best plan until then is returned.

Costs are those of the tables; the plan that is returned may break the true limit where slips are kept
(``ONE_IN_FLIGHT``), which :meth:`~formulations.galvatron.pipeline.PipelineProblem.evaluate` checks.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from math import inf

import numpy as np

from formulations.galvatron.dynamic_program import DEFAULT_UNIT_BYTES, search_stage
from formulations.galvatron.partition import balanced_partition, moved_layer
from formulations.galvatron.pipeline import PipelinePlan, PipelineProblem, is_faster
from formulations.galvatron.slips import REPAIRED, Slip
from formulations.galvatron.stage import StageProblem
from formulations.problem.time_limit import is_over

__all__ = ["Balance", "FoundPlan", "SearchOutcome", "search_base", "search_bmw"]

_MAX_ADJUSTMENTS = 200
"""Partitions of one batch and number of stages that are tried if repetitions are possible (``ALG2_CYCLES``)."""

_BATCHES_WITHOUT_PLAN = 4
"""Batches in a row without a plan after which a repaired search ends: memory forbids them."""


class Balance(StrEnum):
    """The load that a partition balances."""

    TIME = "time"
    MEMORY = "memory"


@dataclass(frozen=True, slots=True)
class FoundPlan:
    """A plan and the cost that its search found for it.

    Parameters
    ----------
    plan
        Batch, partition and strategies.
    cost
        Quanta of a step.
    """

    plan: PipelinePlan
    cost: int

    def is_faster_than(self, other: FoundPlan | None) -> bool:
        """Whether this plan has more samples per quantum."""
        return other is None or is_faster(self.plan.batch, self.cost, other.plan.batch, other.cost)


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """Result of a search.

    Parameters
    ----------
    best
        The best plan found, or None, which does not prove that there is none.
    ended
        Whether the search was complete before its time limit.
    """

    best: FoundPlan | None
    ended: bool = True


def search_base(
    problem: PipelineProblem,
    slips: Slip = REPAIRED,
    unit_bytes: int = DEFAULT_UNIT_BYTES,
    balance: Balance = Balance.TIME,
    time_limit: float = inf,
) -> SearchOutcome:
    """Run Algorithm 1.

    Parameters
    ----------
    problem
        The problem; its tables should be estimated with the same slips.
    slips
        Slips that are kept as printed.
    unit_bytes
        Granularity of memory in the stage search.
    balance
        The load that its one partition per number of stages balances.
    time_limit
        Seconds after which no other stage is searched.
    """
    searcher = _StageSearcher(problem, slips, unit_bytes, time.monotonic() + time_limit)
    balanced = searcher.time_balanced if balance is Balance.TIME else searcher.memory_balanced

    def best_of_batch(batch: int) -> FoundPlan | None:
        return _cheapest([searcher.search(batch, balanced(batch, stages)) for stages in problem.usable_degrees])

    return _over_batches(searcher, best_of_batch, Slip.ALG1_RETURN in slips)


def search_bmw(
    problem: PipelineProblem,
    slips: Slip = REPAIRED,
    unit_bytes: int = DEFAULT_UNIT_BYTES,
    time_limit: float = inf,
) -> SearchOutcome:
    """Run Algorithm 2; parameters and result as for :func:`search_base`, but for the partition."""
    searcher = _StageSearcher(problem, slips, unit_bytes, time.monotonic() + time_limit)
    degrees = [stages for stages in problem.usable_degrees if stages > 1 or Slip.ALG2_STAGES not in slips]

    def best_of_batch(batch: int) -> FoundPlan | None:
        return _cheapest([_adjusted(searcher, batch, stages) for stages in degrees])

    return _over_batches(searcher, best_of_batch, Slip.ALG2_RETURN in slips)


def _over_batches(
    searcher: _StageSearcher, best_of_batch: Callable[[int], FoundPlan | None], returns_at_once: bool
) -> SearchOutcome:
    best: FoundPlan | None = None
    without = 0
    for batch in searcher.problem.batches:
        found = best_of_batch(batch)
        without = 0 if found is not None else without + 1
        if found is not None and found.is_faster_than(best):
            best = found
        if searcher.is_late():
            return SearchOutcome(best, ended=False)
        if without == (1 if returns_at_once else _BATCHES_WITHOUT_PLAN):
            break
    return SearchOutcome(best)


def _adjusted(searcher: _StageSearcher, batch: int, stages: int) -> FoundPlan | None:
    """Lines 6 to 18 of Algorithm 2: all partitions of one batch and number of stages."""
    slips = searcher.slips
    waiting = deque([searcher.memory_balanced(batch, stages)])
    if Slip.ALG2_START not in slips:
        waiting.append(searcher.time_balanced(batch, stages))
    seen = set(waiting)
    found: list[FoundPlan | None] = []
    while waiting and (Slip.ALG2_CYCLES not in slips or len(found) < _MAX_ADJUSTMENTS):
        borders = waiting.popleft()
        plan = searcher.search(batch, borders)
        found.append(plan)
        if plan is None:
            continue
        for moved in searcher.adjustments(plan.plan):
            if moved not in seen or Slip.ALG2_CYCLES in slips:
                waiting.append(moved)
                seen.add(moved)
    return found[-1] if Slip.ALG2_APPEND in slips else _cheapest(found)


def _cheapest(found: list[FoundPlan | None]) -> FoundPlan | None:
    """The cheapest of the plans for one batch."""
    return min((plan for plan in found if plan is not None), key=lambda plan: plan.cost, default=None)


@dataclass(frozen=True, slots=True)
class _SearchedStage:
    """Strategies of a stage, and its quanta for a micro-batch with synchronisation and without."""

    choices: tuple[int, ...]
    cost: int
    repeated: int


class _StageSearcher:
    """Search over the stages of one problem, with a cache of their results."""

    def __init__(self, problem: PipelineProblem, slips: Slip, unit_bytes: int, deadline: float) -> None:
        self.problem, self.slips, self.unit_bytes, self.deadline = problem, slips, unit_bytes, deadline
        self._found: dict[tuple[int, int, int, bytes, int | None], _SearchedStage | None] = {}
        self._partitions: dict[tuple[int, int], dict[Balance, tuple[int, ...]]] = {}
        self._kept: dict[tuple[int, int, int, tuple[int, int], tuple[int, ...]], tuple[int, int]] = {}

    def is_late(self) -> bool:
        """Whether the time is over."""
        return is_over(self.deadline)

    def search(self, batch: int, borders: tuple[int, ...]) -> FoundPlan | None:
        """Galvatron_Search of the paper for one partition: the best number of micro-batches and all strategies."""
        stages = len(borders) - 1
        if not all(self.problem.may_be_stage(*pair) for pair in pairwise(borders)):
            return None
        return _cheapest(
            [
                self._with_micro_batches(batch, borders, count, shared)
                for count in self.problem.rule.counts(batch, stages)
                for shared in self.problem.shared_strategies(stages, batch // count)
            ]
        )

    def time_balanced(self, batch: int, stages: int) -> tuple[int, ...]:
        """Partition whose slowest stage is as fast as possible under the initial strategy."""
        return self._balanced(batch, stages)[Balance.TIME]

    def memory_balanced(self, batch: int, stages: int) -> tuple[int, ...]:
        """Partition whose fullest stage needs the least memory under the initial strategy."""
        return self._balanced(batch, stages)[Balance.MEMORY]

    def adjustments(self, plan: PipelinePlan) -> Iterator[tuple[int, ...]]:
        """Valid partitions with a boundary layer moved out of the slowest stage (appendix B)."""
        times, _ = self._kept_strategies(plan, plan.borders)
        slowest = max(range(plan.stages), key=times.__getitem__)
        _, full = self._kept_strategies(plan, self.time_balanced(plan.batch, plan.stages))
        moves = [moved_layer(plan.borders, slowest, forward) for forward in (True, False)]
        valid = []
        for moved in moves:
            if moved is None:
                continue
            new_times, peaks = self._kept_strategies(plan, moved)
            if max(new_times) <= max(times) and max(peaks) <= min(self.problem.memory_limit, max(full)):
                valid.append((max(new_times), moved))
        if Slip.ALG2_CYCLES in self.slips:
            valid = sorted(valid)[:1]
        yield from (moved for _, moved in valid)

    def _with_micro_batches(
        self, batch: int, borders: tuple[int, ...], count: int, shared: int | None
    ) -> FoundPlan | None:
        stages = len(borders) - 1
        found = []
        for position, pair in enumerate(pairwise(borders)):
            stage = None if self.is_late() else self._searched_stage(stages, position, pair, batch, count, shared)
            if stage is None:
                return None
            found.append(stage)
        choices = tuple(choice for stage in found for choice in stage.choices)
        cost = (count - 1) * max(stage.repeated for stage in found) + sum(stage.cost for stage in found)
        return FoundPlan(PipelinePlan(batch, count, borders, choices), cost)

    def _searched_stage(
        self, stages: int, position: int, pair: tuple[int, int], batch: int, count: int, shared: int | None
    ) -> _SearchedStage | None:
        """Result of a stage, cached: stages of the same layers with equally many in flight are one problem."""
        kinds = self.problem.tables(stages, batch // count).kinds[slice(*pair)].tobytes()
        held = self._in_flight(stages, position, count)
        key = (stages, batch // count, held, kinds, self.problem.shared_in(pair, shared))
        if key not in self._found:
            stage = self._stage(stages, position, pair, batch, count, shared)
            plan = search_stage(stage, self.unit_bytes, self.slips)
            if plan is None or plan.choices is None:
                self._found[key] = None
            else:
                self._found[key] = _SearchedStage(plan.choices, plan.cost, stage.repeated_of(plan.choices))
        return self._found[key]

    def _stage(
        self, stages: int, position: int, pair: tuple[int, int], batch: int, count: int, shared: int | None = None
    ) -> StageProblem:
        tables = self.problem.tables_with(stages, batch // count, shared)
        return tables.stage(*pair, self._in_flight(stages, position, count), self.problem.memory_limit)

    def _in_flight(self, stages: int, position: int, count: int) -> int:
        return 1 if Slip.ONE_IN_FLIGHT in self.slips else self.problem.schedule.in_flight(stages, position, count)

    def _balanced(self, batch: int, stages: int) -> dict[Balance, tuple[int, ...]]:
        """Both partitions of one batch and number of stages, cached for all adjustments."""
        if (batch, stages) not in self._partitions:
            times, memories = zip(*self._initial_loads(batch, stages), strict=True)
            self._partitions[batch, stages] = {
                Balance.TIME: balanced_partition(np.stack(times)),
                Balance.MEMORY: balanced_partition(np.stack(memories)),
            }
        return self._partitions[batch, stages]

    def _initial_loads(self, batch: int, stages: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Time and memory of every layer at every position under the initial strategy.

        Of several numbers of micro-batches the largest counts under which all layers have the first strategy, data
        parallelism; where none does, the smallest, and the first strategy that is possible.
        """
        counts = self.problem.rule.counts(batch, stages)
        divided = [m for m in counts if self._all_have_first(stages, batch // m)]
        count = max(divided, default=counts[0])
        for position in range(stages):
            whole = self._stage(stages, position, (0, self.problem.layers), batch, count)
            rows = np.arange(whole.layers)
            first = whole.allowed.argmax(axis=1)
            memory = (whole.forward + whole.states)[rows, first]
            yield whole.cost[rows, first].astype(np.float64), memory.astype(np.float64)

    def _all_have_first(self, stages: int, micro_batch: int) -> bool:
        tables = self.problem.tables(stages, micro_batch)
        return bool(tables.allowed[tables.kinds, 0].all())

    def _kept_strategies(self, plan: PipelinePlan, borders: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """Time and peak of the stages of a partition when every layer keeps its strategy."""
        times, peaks = [], []
        for position, pair in enumerate(pairwise(borders)):
            choices = plan.choices[slice(*pair)]
            held = self._in_flight(plan.stages, position, plan.micro_batches)
            key = (plan.stages, plan.batch // plan.micro_batches, held, pair, choices)
            if key not in self._kept:
                stage = self._stage(plan.stages, position, pair, plan.batch, plan.micro_batches)
                self._kept[key] = stage.cost_of(choices), stage.peak(choices)
            time_of_stage, peak = self._kept[key]
            times.append(time_of_stage)
            peaks.append(peak)
        return times, peaks
