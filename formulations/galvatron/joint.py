"""Stages, partition, strategies, batch and micro-batches of Galvatron-BMW at once, with a proven gap.

For given stages ``P``, batch and number ``m`` of micro-batches a step takes ``(m - 1) max_i C'_i + sum_i C_i``. For any
limit ``t`` on every ``C'_i``, the best partition by the lower bounds of all windows of layers is a lower bound on the
sum. So plans whose slowest stage takes more than some ``t`` are too slow, ``t`` falls, windows drop out, and the bound
rises. Where that stops, the windows of the best partition are solved exactly at ``t``
(:mod:`formulations.galvatron.labels`): either the bound rises, or all of them are solved and are a plan.
Windows of the same layers with equally many micro-batches in flight are one problem, solved once.

The search is best first over all combinations of these numbers (:mod:`formulations.galvatron.combinations`): each step
raises the bound of the combination with the least bound. A bound leaves memory out at first, then comes from prices.
The search ends when the least bound is within the gap of the best plan. All bounds are exact integers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction
from heapq import heapify, heappop, heappush

import numpy as np

from formulations.galvatron.best_partition import SolvedWindow, best_partition
from formulations.galvatron.combinations import Combination, combinations
from formulations.galvatron.labels import StageResult, solve_stage
from formulations.galvatron.pipeline import PipelinePlan, PipelineProblem
from formulations.galvatron.stage import StageProblem
from formulations.galvatron.windows import IMPOSSIBLE, WindowBounds, window_bounds
from formulations.problem.strategy_problem import IntArray
from formulations.problem.time_limit import is_over

__all__ = ["JointResult", "solve_joint"]

DEFAULT_GAP = Fraction(1, 100)

_STAGE_GAP_SHARE = 2
"""Stages are solved to this part of the gap."""

_LABEL_LIMITS = (100, 5_000, 50_000, 400_000)
"""Labels of one layer without a pipeline, tried one after another until the plan is proven."""

_WINDOW_LABEL_LIMIT = 50_000
"""Labels of one layer of a window; few, because a limit on micro-batches makes comparing labels slow."""

_INTERVALS = 8
"""Number of intervals of the slowest stage's time, for a bound on a whole step."""


@dataclass(frozen=True, slots=True)
class JointResult:
    """The best plan and a bound on all of them.

    Parameters
    ----------
    plan, cost
        The found plan with most samples per quantum and its quanta, or None.
    bound
        Lower bound on the quanta per sample of all plans; None where it is proven that there is no plan.
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


def solve_joint(
    problem: PipelineProblem,
    relative_gap: Fraction = DEFAULT_GAP,
    start: PipelinePlan | None = None,
    time_limit: float = 120.0,
    report: Callable[[Fraction | None, Fraction], None] | None = None,
) -> JointResult:
    """Find the plan with most samples per second.

    Parameters
    ----------
    problem
        The problem. No micro-batch may be faster with synchronisation than without.
    relative_gap
        The plan may take this much more per sample than the bound, relative to it; 0 for the optimum.
    start
        A plan to begin with; one that does not fit is ignored.
    time_limit
        Seconds after which no further window is solved; the bound then covers all open combinations.
    report
        Called with the best cost per sample and its bound, in quanta, whenever the bound rises or a plan is found.
    """
    search = _JointSearch(problem, relative_gap, time.monotonic() + time_limit, report)
    if start is not None:
        search.offer(start)
    return search.run()


class _OutOfTimeError(Exception):
    """Bounds of windows are missing when the time is over."""


class _JointSearch:
    """One search: the best plan so far, and all windows."""

    def __init__(
        self,
        problem: PipelineProblem,
        relative_gap: Fraction,
        deadline: float,
        report: Callable[[Fraction | None, Fraction], None] | None = None,
    ) -> None:
        self.problem, self.gap, self.deadline = problem, relative_gap, deadline
        self.report = report or (lambda *_: None)
        self.best: PipelinePlan | None = None
        self.best_cost: int | None = None
        self.kinds = problem.tables(problem.usable_degrees[0], 1).kinds
        self.windows: dict[tuple[int, int, int], dict[tuple[bytes, int | None], SolvedWindow]] = {}
        self.places: dict[bytes, tuple[IntArray, IntArray]] = {}
        self.first_bounds: dict[tuple[int, int, int, int | None], WindowBounds] = {}
        self.stages_solved = 0
        self.forbidden = np.array(
            [
                [not problem.may_be_stage(first, end) for end in range(problem.layers + 1)]
                for first in range(problem.layers + 1)
            ]
        )

    def offer(self, plan: PipelinePlan) -> None:
        """Take a plan if it fits and is faster."""
        found = self.problem.evaluate(plan)
        if found.fits and (self._per_sample is None or Fraction(found.cost, plan.batch) < self._per_sample):
            self.best, self.best_cost = plan, found.cost

    def run(self) -> JointResult:
        """Raise the least bound of all combinations until it is within the gap of the best plan."""
        waiting = [(each.bound, number, each) for number, each in enumerate(combinations(self.problem))]
        heapify(waiting)
        open_bounds = []
        reported: tuple[Fraction | None, Fraction] | None = None
        while waiting:
            bound, number, combination = heappop(waiting)
            if reported != (self._per_sample, bound):
                reported = self._per_sample, bound
                self.report(*reported)
            if self._is_closed(bound * combination.batch, combination.batch):
                break
            if self._is_late():
                open_bounds.append(bound)
                break
            try:
                further = self._step(combination)
            except _OutOfTimeError:
                open_bounds.append(bound)
                break
            if further is not None and further.steps == combination.steps:
                open_bounds.append(further.bound)
            elif further is not None:
                heappush(waiting, (further.bound, number, further))
        proven = None if self._per_sample is None else self._per_sample * (1 - self.gap)
        bounds = [bound for bound in (proven, *open_bounds) if bound is not None]
        return JointResult(self.best, self.best_cost, min(bounds, default=None), self.stages_solved)

    def _is_late(self) -> bool:
        return is_over(self.deadline)

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

    def _step(self, combination: Combination) -> Combination | None:
        """Raise the bound of a combination.

        Returns
        -------
        Combination or None
            None where it has no plan beyond the gap; the number of steps is unchanged without progress.
        """
        if combination.stages == 1:
            return self._step_of_one_stage(combination)
        if combination.shared is not None and combination.steps == 0:
            total, _, _ = self._settled(replace(combination, shared=None))
            if total >= IMPOSSIBLE or self._is_closed(total, combination.batch):
                return None
        total, borders, limit = self._settled(combination)
        if total >= IMPOSSIBLE or self._is_closed(total, combination.batch):
            return None
        settled = replace(combination, limit=limit)
        # The first step only orders combinations by their bounds; windows are solved where these are least.
        if combination.steps == 0 or self._refine(settled, borders):
            settled = replace(settled, steps=combination.steps + 1)
        return replace(settled, bound=max(combination.bound, self._bound_of_step(settled)))

    def _bound_of_step(self, combination: Combination) -> Fraction:
        """Bound in quanta per sample: the least, over times of the slowest stage, of that and a bound on all stages."""
        times = []
        for position in range(combination.stages):
            held = self.problem.schedule.in_flight(combination.stages, position, combination.micro_batches)
            times.append(self._first_bounds(combination, held).repeated)
        least, _ = best_partition(np.stack(times), np.maximum)
        most = 2 * least if combination.limit is None else combination.limit
        slowest = sorted({least + (most - least) * k // _INTERVALS for k in range(_INTERVALS)})
        ends: list[int | None] = [*slowest[1:], combination.limit]
        totals = [best_partition(self._bounds_at(combination, end))[0] for end in ends]
        repeats = combination.micro_batches - 1
        return min(
            Fraction(total + repeats * time_of_slowest, combination.batch)
            for total, time_of_slowest in zip(totals, slowest, strict=True)
        )

    def _settled(self, combination: Combination) -> tuple[int, tuple[int, ...], int | None]:
        """Lower the limit on micro-batches as far as the bounds of windows allow.

        Returns
        -------
        total, borders, limit
            A bound on the sum of all stages for plans within the gap of the best, the partition that attains it, and
            the limit on the slowest stage of such a plan.
        """
        repeats = combination.micro_batches - 1
        cutoff, limit = self._cutoff(combination.batch), combination.limit
        while True:
            total, borders = best_partition(self._bounds_at(combination, limit))
            if cutoff is None or total >= cutoff or repeats == 0 or self._is_late():
                return total, borders, limit
            lowered = -((total - cutoff) // repeats) - 1
            if limit is not None and lowered >= limit:
                return total, borders, limit
            limit = lowered

    def _step_of_one_stage(self, combination: Combination) -> Combination | None:
        """Without a pipeline everything adds up, and one stage is the whole problem: solve it with more labels."""
        if combination.steps == len(_LABEL_LIMITS):
            return combination
        tables = self.problem.tables_with(1, combination.micro_batch, combination.shared)
        held = self.problem.schedule.in_flight(1, 0, combination.micro_batches)
        repeats = combination.micro_batches - 1
        stage = tables.stage(0, self.problem.layers, held, self.problem.memory_limit, repeats)
        found = solve_stage(
            stage,
            relative_gap=float(self.gap / _STAGE_GAP_SHARE),
            cutoff=self._cutoff(combination.batch),
            label_limit=_LABEL_LIMITS[combination.steps],
            deadline=self.deadline,
        )
        self.stages_solved += 1
        if found.choices is not None:
            borders = (0, self.problem.layers)
            self.offer(PipelinePlan(combination.batch, combination.micro_batches, borders, found.choices))
        if found.bound is None or self._is_closed(found.bound, combination.batch):
            return None
        bound = max(combination.bound, Fraction(found.bound, combination.batch))
        return replace(combination, bound=bound, steps=combination.steps + 1)

    def _bounds_at(self, combination: Combination, limit: int | None) -> IntArray:
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
            bounds[self.forbidden] = IMPOSSIBLE
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

    def _first_bounds(self, combination: Combination, held: int) -> WindowBounds:
        stages, micro_batch, shared = combination.stages, combination.micro_batch, combination.shared
        key = (stages, micro_batch, held, shared)
        if key not in self.first_bounds:
            if self._is_late():
                raise _OutOfTimeError
            tables = self.problem.tables_with(stages, micro_batch, shared)
            self.first_bounds[key] = window_bounds(tables, held, self.problem.memory_limit)
        return self.first_bounds[key]

    def _refine(self, combination: Combination, borders: tuple[int, ...]) -> bool:
        """Solve the windows of a partition that are not solved under the limit; offer the plan where all are.

        Returns
        -------
        bool
            Whether a window was solved or a better plan found.
        """
        progressed, limit = False, combination.limit
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
                progressed = True
            if found is None or found.choices is None:
                return progressed
            choices += found.choices
        before = self._per_sample
        self.offer(PipelinePlan(combination.batch, combination.micro_batches, borders, tuple(choices)))
        return progressed or self._per_sample != before

    def _window(self, combination: Combination, position: int, pair: tuple[int, int]) -> SolvedWindow:
        held = self.problem.schedule.in_flight(combination.stages, position, combination.micro_batches)
        windows = self.windows.setdefault((combination.stages, combination.micro_batch, held), {})
        key = self.kinds[slice(*pair)].tobytes(), self.problem.shared_in(pair, combination.shared)
        return windows.setdefault(key, SolvedWindow())

    def _solve(self, window: SolvedWindow, stage: StageProblem, limit: int | None) -> StageResult:
        gap = float(self.gap / _STAGE_GAP_SHARE)
        result = solve_stage(stage, limit, gap, label_limit=_WINDOW_LABEL_LIMIT, deadline=self.deadline)
        repeated = 0 if result.choices is None else stage.repeated_of(result.choices)
        window.solved.append((limit, result, repeated))
        self.stages_solved += 1
        return result
