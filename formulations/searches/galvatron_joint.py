"""Stages, partition, strategies, batch and micro-batches of Galvatron-BMW at once, with a proven gap.

For given stages ``P``, batch and number ``m`` of micro-batches a step takes ``(m - 1) max_i C'_i + sum_i C_i``. For any
limit ``t`` on every ``C'_i``, the cheapest way through the positions of the pipeline, over lower bounds of all windows
of layers, bounds the sum. So plans whose slowest stage takes more than some ``t`` are too slow, ``t`` falls, windows
drop out, and the bound rises. Where that stops, the windows on the cheapest way are solved exactly at ``t``
(:mod:`formulations.searches.galvatron_labels`): either the bound rises, or all of them are solved and are a plan.
Windows of the same layers with as many micro-batches in flight are one problem, solved once.

With as many micro-batches in flight, more micro-batches of the same size are never slower per sample. So of those that
fill the pipeline only the largest number is looked at. Where layers are tied, every strategy that they may share is a
combination of its own, which only windows with such layers notice. Combinations are taken in the order of a bound
without memory; when that is within the gap of the best plan, the rest is, too. All bounds are exact integers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np

from formulations.models.galvatron import StageProblem
from formulations.models.galvatron_costs import LayerTables
from formulations.models.galvatron_pipeline import PipelinePlan, PipelineProblem
from formulations.models.pipeline_schedule import Schedule
from formulations.problem import IntArray
from formulations.searches.galvatron_labels import StageResult, solve_stage
from formulations.searches.galvatron_windows import IMPOSSIBLE, WindowBounds, window_bounds

__all__ = ["JointResult", "solve_joint"]

DEFAULT_GAP = Fraction(1, 100)

_STAGE_GAP_SHARE = 2
"""Stages are solved to this part of the gap."""

_LABEL_LIMIT = 50_000
"""Of one layer of a window: fewer than of a single stage, as a limit on micro-batches makes comparing them slow."""


@dataclass(frozen=True, slots=True)
class JointResult:
    """The best plan and a bound on all of them.

    Parameters
    ----------
    plan, cost
        The plan with most samples per quantum that was found and its quanta, or None.
    bound
        No plan takes fewer quanta per sample; None where there is no plan at all, which is then proven.
    stages_solved
        Windows that were solved exactly.
    """

    plan: PipelinePlan | None
    cost: int | None
    bound: Fraction | None
    stages_solved: int

    @property
    def quanta_per_sample(self) -> Fraction | None:
        """Cost over batch."""
        return None if self.plan is None or self.cost is None else Fraction(self.cost, self.plan.batch)

    @property
    def gap(self) -> float | None:
        """Distance from the bound, relative to the cost; None where one of them is missing."""
        found = self.quanta_per_sample
        if found is None or self.bound is None:
            return None
        return float((found - self.bound) / found) if found else 0.0


@dataclass(frozen=True, slots=True)
class _Combination:
    """Numbers that are fixed while the partition and strategies are decided, and the strategy of tied layers."""

    stages: int
    batch: int
    micro_batches: int
    shared: int | None
    bound: Fraction

    @property
    def micro_batch(self) -> int:
        return self.batch // self.micro_batches


@dataclass(slots=True)
class _Window:
    """What is known of one run of layers at one number of micro-batches in flight."""

    solved: list[tuple[int | None, StageResult, int]] = field(default_factory=list)

    def bound_at(self, limit: int | None) -> int:
        """A bound under a limit is one under any smaller limit."""
        bounds = [_bound_of(result) for solved, result, _ in self.solved if _allows(solved, limit)]
        return max(bounds, default=0)

    def plan_at(self, limit: int | None) -> StageResult | None:
        """A solve whose limit was as large and whose plan keeps this one."""
        for solved, result, repeated in self.solved:
            if result.choices is not None and _allows(solved, limit) and (limit is None or repeated <= limit):
                return result
        return None


def solve_joint(
    problem: PipelineProblem,
    relative_gap: Fraction = DEFAULT_GAP,
    start: PipelinePlan | None = None,
    time_limit: float = 120.0,
) -> JointResult:
    """Find the plan with most samples per second.

    Parameters
    ----------
    problem
        What may be decided. No micro-batch may be faster with synchronisation than without.
    relative_gap
        The plan may take this much more per sample than the bound, relative to it; 0 for the optimum.
    start
        A plan to begin with; one that does not fit is ignored.
    time_limit
        Seconds after which nothing else is solved; the bound then says what is open.
    """
    search = _JointSearch(problem, relative_gap, time.monotonic() + time_limit)
    if start is not None:
        search.offer(start)
    return search.run()


class _JointSearch:
    """One search: the best plan so far, and all windows."""

    def __init__(self, problem: PipelineProblem, relative_gap: Fraction, deadline: float) -> None:
        self.problem, self.gap, self.deadline = problem, relative_gap, deadline
        self.best: PipelinePlan | None = None
        self.best_cost: int | None = None
        self.kinds = problem.tables(problem.usable_degrees[0], 1).kinds
        self.windows: dict[tuple[int, int, int], dict[tuple[bytes, int | None], _Window]] = {}
        self.places: dict[bytes, tuple[IntArray, IntArray]] = {}
        self.first_bounds: dict[tuple[int, int, int, int | None], WindowBounds] = {}
        self.stages_solved = 0

    def offer(self, plan: PipelinePlan) -> None:
        """Take a plan if it fits and is faster."""
        found = self.problem.evaluate(plan)
        if found.fits and (self._per_sample is None or Fraction(found.cost, plan.batch) < self._per_sample):
            self.best, self.best_cost = plan, found.cost

    def run(self) -> JointResult:
        """Look at all combinations in the order of their bounds."""
        open_bounds = []
        for combination in sorted(self._combinations(), key=lambda c: c.bound):
            if self._is_closed(combination.bound * combination.batch, combination.batch):
                break
            left: Fraction | int | None = combination.bound * combination.batch
            if time.monotonic() < self.deadline:
                left = self._close(combination)
            if left is not None:
                open_bounds.append(Fraction(left, combination.batch))
        proven = None if self._per_sample is None else self._per_sample * (1 - self.gap)
        bounds = [bound for bound in (proven, *open_bounds) if bound is not None]
        return JointResult(self.best, self.best_cost, min(bounds, default=None), self.stages_solved)

    @property
    def _per_sample(self) -> Fraction | None:
        return None if self.best is None or self.best_cost is None else Fraction(self.best_cost, self.best.batch)

    def _cutoff(self, batch: int) -> int | None:
        """The least cost that is within the gap of the best plan, for a batch."""
        if self._per_sample is None:
            return None
        exact = self._per_sample * (1 - self.gap) * batch
        return -(-exact.numerator // exact.denominator)

    def _is_closed(self, bound: Fraction | int, batch: int) -> bool:
        cutoff = self._cutoff(batch)
        return cutoff is not None and bound >= cutoff

    def _combinations(self) -> Iterator[_Combination]:
        """Stages, batch and micro-batches with a bound that leaves memory out."""
        chosen: dict[tuple[int, int, int], int] = {}
        for stages in self.problem.usable_degrees:
            for batch in self.problem.batches:
                for count in self.problem.rule.counts(batch, stages):
                    key = (stages, batch // count, self._distinct(stages, count))
                    chosen[key] = max(count, chosen.get(key, 0))
        for (stages, micro_batch, _), count in chosen.items():
            for shared in self.problem.shared_strategies(stages, micro_batch):
                tables = self.problem.tables_with(stages, micro_batch, shared)
                if tables.allowed[tables.kinds].any(axis=1).all():
                    bound = _free_bound(tables, stages, micro_batch, count)
                    yield _Combination(stages, micro_batch * count, count, shared, bound)

    def _distinct(self, stages: int, count: int) -> int:
        """Equal for numbers of micro-batches of which only the largest counts."""
        if stages == 1:
            return 1
        return count if self.problem.schedule is Schedule.GPIPE else min(count, stages)

    def _close(self, combination: _Combination) -> int | None:
        """Prove that a combination has no plan beyond the gap, or return the bound that is left."""
        if combination.stages == 1:
            return self._close_one_stage(combination)
        if combination.shared is not None:
            total, _, _ = self._settled(replace(combination, shared=None), None)
            if total >= IMPOSSIBLE or self._is_closed(total, combination.batch):
                return None
        limit: int | None = None
        while True:
            total, borders, limit = self._settled(combination, limit)
            if total >= IMPOSSIBLE or self._is_closed(total, combination.batch):
                return None
            if time.monotonic() >= self.deadline or not self._refine(combination, borders, limit):
                return total + (combination.micro_batches - 1) * self._slowest_stage(combination)

    def _settled(self, combination: _Combination, limit: int | None) -> tuple[int, tuple[int, ...], int | None]:
        """Lower the limit on micro-batches as far as the bounds of windows allow.

        Returns
        -------
        total, borders, limit
            A bound on the sum of all stages for plans within the gap of the best, the partition that attains it, and
            what the slowest stage of such a plan may take.
        """
        repeats = combination.micro_batches - 1
        cutoff = self._cutoff(combination.batch)
        while True:
            total, borders = _cheapest_way(self._bounds_at(combination, limit))
            late = time.monotonic() >= self.deadline
            if cutoff is None or total >= cutoff or repeats == 0 or late:
                return total, borders, limit
            lowered = -((total - cutoff) // repeats) - 1
            if limit is not None and lowered >= limit:
                return total, borders, limit
            limit = lowered

    def _slowest_stage(self, combination: _Combination) -> int:
        """A bound on the time of a micro-batch in the slowest stage."""
        times = []
        for position in range(combination.stages):
            held = self.problem.schedule.in_flight(combination.stages, position, combination.micro_batches)
            times.append(self._first_bounds(combination, held).repeated)
        return _cheapest_way(np.stack(times), np.maximum)[0]

    def _close_one_stage(self, combination: _Combination) -> int | None:
        """Without a pipeline everything adds up, and one stage is the whole problem."""
        tables = self.problem.tables_with(1, combination.micro_batch, combination.shared)
        held = self.problem.schedule.in_flight(1, 0, combination.micro_batches)
        repeats = combination.micro_batches - 1
        stage = tables.stage(0, self.problem.layers, held, self.problem.memory_limit, repeats)
        cutoff = self._cutoff(combination.batch)
        found = solve_stage(
            stage, relative_gap=float(self.gap / _STAGE_GAP_SHARE), cutoff=cutoff, deadline=self.deadline
        )
        self.stages_solved += 1
        if found.choices is not None:
            borders = (0, self.problem.layers)
            self.offer(PipelinePlan(combination.batch, combination.micro_batches, borders, found.choices))
        if found.bound is None or self._is_closed(found.bound, combination.batch):
            return None
        return found.bound

    def _bounds_at(self, combination: _Combination, limit: int | None) -> IntArray:
        """Bounds of all windows at all positions under a limit, shape ``(P, L + 1, L + 1)``."""
        stages = combination.stages
        found = []
        for position in range(stages):
            held = self.problem.schedule.in_flight(stages, position, combination.micro_batches)
            bounds = self._first_bounds(combination, held).at(limit).copy()
            for (kinds, shared), window in self.windows.get((stages, combination.micro_batch, held), {}).items():
                if shared in (None, combination.shared):
                    places = self._places(kinds)
                    bounds[places] = np.maximum(bounds[places], window.bound_at(limit))
            found.append(bounds)
        return np.stack(found)

    def _places(self, kinds: bytes) -> tuple[IntArray, IntArray]:
        """First layers and ends of all windows of these kinds of layers."""
        if kinds not in self.places:
            count = len(kinds) // self.kinds.itemsize
            firsts = [
                first
                for first in range(self.problem.layers - count + 1)
                if self.kinds[first : first + count].tobytes() == kinds
            ]
            self.places[kinds] = np.array(firsts), np.array(firsts) + count
        return self.places[kinds]

    def _first_bounds(self, combination: _Combination, held: int) -> WindowBounds:
        stages, micro_batch, shared = combination.stages, combination.micro_batch, combination.shared
        key = (stages, micro_batch, held, shared)
        if key not in self.first_bounds:
            tables = self.problem.tables_with(stages, micro_batch, shared)
            self.first_bounds[key] = window_bounds(tables, held, self.problem.memory_limit)
        return self.first_bounds[key]

    def _refine(self, combination: _Combination, borders: tuple[int, ...], limit: int | None) -> bool:
        """Solve the windows on a way that are not solved under the limit; offer the plan where all are.

        Returns
        -------
        bool
            Whether anything was learnt.
        """
        learnt = False
        choices: list[int] = []
        for position in range(combination.stages):
            pair = (borders[position], borders[position + 1])
            window = self._window(combination, position, pair)
            found = window.plan_at(limit)
            if found is None and not any(solved == limit for solved, _, _ in window.solved):
                stage = self.problem.stage(
                    combination.stages,
                    position,
                    pair,
                    combination.batch,
                    combination.micro_batches,
                    combination.shared,
                )
                found = self._solve(window, stage, limit)
                learnt = True
            if found is None or found.choices is None:
                return learnt
            choices += found.choices
        before = self._per_sample
        self.offer(PipelinePlan(combination.batch, combination.micro_batches, borders, tuple(choices)))
        return learnt or self._per_sample != before

    def _window(self, combination: _Combination, position: int, pair: tuple[int, int]) -> _Window:
        held = self.problem.schedule.in_flight(combination.stages, position, combination.micro_batches)
        windows = self.windows.setdefault((combination.stages, combination.micro_batch, held), {})
        key = self.kinds[slice(*pair)].tobytes(), self.problem.shared_in(pair, combination.shared)
        return windows.setdefault(key, _Window())

    def _solve(self, window: _Window, stage: StageProblem, limit: int | None) -> StageResult:
        gap = float(self.gap / _STAGE_GAP_SHARE)
        result = solve_stage(stage, limit, gap, label_limit=_LABEL_LIMIT, deadline=self.deadline)
        repeated = 0 if result.choices is None else stage.repeated_of(result.choices)
        window.solved.append((limit, result, repeated))
        self.stages_solved += 1
        return result


def _bound_of(result: StageResult) -> int:
    return IMPOSSIBLE if result.bound is None else result.bound


def _allows(solved: int | None, limit: int | None) -> bool:
    """Whether a limit that was solved is as large as another; None is no limit."""
    return solved is None or (limit is not None and solved >= limit)


def _free_bound(tables: LayerTables, stages: int, micro_batch: int, count: int) -> Fraction:
    """Quanta per sample without memory: the slowest stage takes at least its share and its slowest layer."""
    synchronised = np.where(tables.allowed, tables.synchronised, IMPOSSIBLE).min(axis=1)[tables.kinds]
    repeated = np.where(tables.allowed, tables.repeated, IMPOSSIBLE).min(axis=1)[tables.kinds]
    slowest = max(-(-int(repeated.sum()) // stages), int(repeated.max()))
    return Fraction((count - 1) * slowest + int(synchronised.sum()), micro_batch * count)


def _cheapest_way(bounds: IntArray, combine: np.ufunc = np.add) -> tuple[int, tuple[int, ...]]:
    """Cheapest way through all positions, whose windows `combine` joins; every stage has a layer."""
    stages, size, _ = bounds.shape
    best = np.full(size, IMPOSSIBLE)
    best[0] = 0
    sources = []
    for position in range(stages):
        through = np.minimum(combine(best[:, None], bounds[position]), IMPOSSIBLE)
        sources.append(through.argmin(axis=0))
        best = through.min(axis=0)
    borders = [size - 1]
    for source in reversed(sources):
        borders.append(int(source[borders[-1]]))
    return int(best[-1]), tuple(reversed(borders))
