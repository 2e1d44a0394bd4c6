"""The exact plan of one Galvatron-BMW stage: labels from the last layer to the first, pruned by priced bounds.

Read backwards, the peak of Eq. 2 is a recursion. With ``U_l`` the states of layers ``l ..`` and ``A_l`` the peak of the
backward steps ``l ..`` when these layers are alone,

    U_l = O_ms(l) + U_{l+1}        A_l = max(U_l + O_f(l) + O_b(l), O_ms(l) + O_f(l) + A_{l+1}),

so a label ``(cost, U, A)`` with the layout of its first layer is the whole state for the layers before, and a label
that is dominated in all three by another of the same layout is dropped. Layouts with equal transformation costs from
each layout before count as one here. A limit on the time of a micro-batch is a fourth number. The completion of a label
is bounded by the price of :mod:`formulations.galvatron.prices`; labels that cannot be better than the incumbent by
more than the gap are dropped, too. If no label is left, the incumbent is proven. All numbers are exact integers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

import numpy as np

from formulations.galvatron.dynamic_program import search_stage
from formulations.galvatron.prices import PricedStage, best_priced
from formulations.galvatron.stage import StageProblem
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import BoolArray, IntArray
from formulations.problem.time_limit import is_over

__all__ = ["StageResult", "solve_stage"]

DEFAULT_LABEL_LIMIT = 200_000
"""Labels of one layer, before the search gives up on a proof."""

_FIRST_LABELS = 100
"""Labels of one layer in the first run; every next run keeps :data:`_WIDENING` times as many."""

_WIDENING = 10

_TABLE_UNITS = 2048
"""Units of memory in the table of Algorithm 3, whose plan is taken before the third run."""

_COST, _STATES, _PEAK, _REPEATED, _STRATEGY, _PARENT, _BOUND = range(7)
_FIELDS = 7
_CANDIDATES = 10
"""Labels that are compared with each other, for each that is kept."""

_NO_LIMIT = 2**62


@dataclass(frozen=True, slots=True)
class StageResult:
    """The best plan of a stage and a bound on all of them.

    Parameters
    ----------
    choices, cost
        One strategy per layer and their cost, or None where no plan was found.
    bound
        Lower bound on the cost of all feasible plans; None where it is proven that there is none.
    """

    choices: tuple[int, ...] | None
    cost: int | None
    bound: int | None

    @property
    def is_infeasible(self) -> bool:
        """Whether it is proven that there is no plan."""
        return self.bound is None


def solve_stage(
    stage: StageProblem,
    repeated_limit: int | None = None,
    relative_gap: float = 0.0,
    cutoff: int | None = None,
    label_limit: int = DEFAULT_LABEL_LIMIT,
    deadline: float = inf,
    start: tuple[int, ...] | None = None,
) -> StageResult:
    """Find the cheapest plan of a stage.

    Parameters
    ----------
    stage
        Layers and strategies.
    repeated_limit
        Quanta that a micro-batch without synchronisation may take, or None.
    relative_gap
        The plan may cost this much more than the bound, relative to its cost; 0 for the optimum.
    cutoff
        Plans that cost as much or more are of no interest: a bound of this size is enough. None for no such cost.
    label_limit
        Labels of one layer; with more, the search returns the plan and bound found until then.
    deadline
        Of the monotonic clock; when it has passed, no further layer is added to the labels.
    start
        A plan to begin with; one that does not fit is ignored.
    """
    if not stage.allowed.any(axis=1).all():
        return StageResult(None, None, None)
    incumbent = _Incumbent(stage, repeated_limit)
    if start is not None:
        incumbent.offer(start)
    best = best_priced(stage, repeated_limit, incumbent.offer)
    if best is None:
        return StageResult(None, None, None)
    priced, value, price = best
    dual = max(0, -((-value) >> priced.shift))
    search = _LabelSearch(priced, price, repeated_limit)
    for kept in _widening(label_limit):
        if kept == _FIRST_LABELS * _WIDENING**2:
            table = search_stage(stage, 1 + stage.memory_limit // _TABLE_UNITS)
            if table is not None and table.choices is not None:
                incumbent.offer(table.choices)
        wanted = _NO_LIMIT if cutoff is None else cutoff
        if incumbent.cost is not None:
            wanted = min(wanted, incumbent.cost - int(relative_gap * incumbent.cost))
        if wanted <= dual:
            break
        found, complete = search.run(wanted, kept, deadline)
        if found is not None:
            incumbent.offer(found)
        if complete and wanted == _NO_LIMIT and found is None:
            return StageResult(None, None, None)
        if complete:
            # No label below `wanted` was dropped; a label of higher cost may have survived, and proves nothing.
            dual = max(dual, wanted if found is None else min(wanted, stage.cost_of(found)))
            break
    return StageResult(incumbent.choices, incumbent.cost, min(dual, incumbent.value))


def _widening(label_limit: int) -> Iterator[int]:
    """Labels of one layer, run by run: better plans of narrow runs leave less to the wide ones."""
    kept = _FIRST_LABELS
    while kept < label_limit:
        yield kept
        kept *= _WIDENING
    yield label_limit


class _Incumbent:
    """The cheapest feasible plan found so far."""

    def __init__(self, stage: StageProblem, repeated_limit: int | None) -> None:
        self.stage = stage
        self.repeated_limit = repeated_limit
        self.choices: tuple[int, ...] | None = None
        self.cost: int | None = None

    @property
    def value(self) -> int:
        """Its cost, or a number above all costs."""
        return _NO_LIMIT if self.cost is None else self.cost

    def offer(self, choices: tuple[int, ...]) -> None:
        """Take a plan if it is feasible and cheaper."""
        cost = self.stage.cost_of(choices)
        if (self.cost is None or cost < self.cost) and self.stage.is_feasible(choices, self.repeated_limit):
            self.choices, self.cost = choices, cost


class _LabelSearch:
    """Extends labels layer by layer at a fixed price."""

    def __init__(self, priced: PricedStage, price: int, repeated_limit: int | None) -> None:
        stage = priced.stage
        self.priced, self.price = priced, price
        self.repeated_limit = _NO_LIMIT if repeated_limit is None else repeated_limit
        self.prefix = priced.prefixes(price) - price * priced.memory_limit
        self.seen_before = _layouts_seen_before(stage)
        self.memory_before = _before(np.where(stage.allowed, stage.forward + stage.states, _NO_LIMIT))
        self.repeated_before = _before(np.where(stage.allowed, stage.repeated, _NO_LIMIT))

    def run(self, cutoff: int, kept: int, deadline: float) -> tuple[tuple[int, ...] | None, bool]:
        """Look for a plan that costs less than `cutoff`.

        Parameters
        ----------
        cutoff
            Plans that cost as much or more are of no interest.
        kept
            Labels per layer; of more, those with the smallest bounds go on.
        deadline
            Of the monotonic clock.

        Returns
        -------
        choices, complete
            The cheapest plan found, or None, and whether nothing that may cost less than `cutoff` was dropped.
        """
        stage, priced = self.priced.stage, self.priced
        labels = np.zeros((1, _FIELDS), dtype=np.int64)
        labels[0, _STRATEGY] = -1
        history, complete = [], True
        scaled_cutoff = min(cutoff, _NO_LIMIT >> priced.shift) << priced.shift
        for layer in reversed(range(stage.layers)):
            if is_over(deadline):
                return None, False
            after = stage.transformation[(layer + 1) % stage.layers]
            rows = np.stack(
                [
                    stage.cost[layer],
                    stage.repeated[layer],
                    stage.forward[layer],
                    stage.backward[layer],
                    stage.states[layer],
                ]
            )
            longer = _extend(
                labels,
                rows,
                stage.allowed[layer],
                stage.layouts,
                after,
                stage.repeats,
                self.prefix[layer],
                self._scales(layer),
                (
                    scaled_cutoff,
                    stage.memory_limit - int(self.memory_before[layer]),
                    self.repeated_limit - int(self.repeated_before[layer]),
                ),
            )
            longer, cut = _smallest_bounds(longer, _CANDIDATES * kept)
            complete = complete and not cut
            longer = longer[np.lexsort((longer[:, _PEAK], longer[:, _STATES], longer[:, _COST]))]
            seen = self.seen_before[layer]
            undominated = _undominated if self.repeated_limit == _NO_LIMIT else _undominated_in_time
            labels = longer[undominated(longer, seen[stage.layouts], int(seen.max()) + 1)]
            labels, cut = _smallest_bounds(labels, kept)
            complete = complete and not cut
            history.append(labels)
            if not len(labels):
                return None, complete
        return _best_plan(history), complete

    def _scales(self, layer: int) -> tuple[int, int, int]:
        """Shift of the price, and the price of a byte of the peak and of the states of a label.

        The peak of the layers from this one on stands for their own backward steps, their states for those before.
        """
        behind, all_steps = int(self.priced.weight_from[layer]), int(self.priced.weight_from[0])
        return self.priced.shift, self.price * behind, self.price * (all_steps - behind)


def _smallest_bounds(labels: IntArray, count: int) -> tuple[IntArray, bool]:
    """At most so many labels, those with the smallest bounds, and whether there were more."""
    if len(labels) <= count:
        return labels, False
    return labels[np.argpartition(labels[:, _BOUND], count)[:count]], True


def _best_plan(history: list[IntArray]) -> tuple[int, ...]:
    """Strategies of the cheapest of the last labels, the first layer first."""
    index = int(history[-1][:, _COST].argmin())
    choices = []
    for labels in reversed(history):
        choices.append(int(labels[index, _STRATEGY]))
        index = int(labels[index, _PARENT])
    return tuple(choices)


def _before(table: IntArray) -> IntArray:
    """Least sum of a table over the layers before each one, shape ``(L,)``."""
    sums: IntArray = np.concatenate([[0], np.cumsum(table.min(axis=1))[:-1]])
    return sums


def _layouts_seen_before(stage: StageProblem) -> IntArray:
    """Classes of each layer's layouts with equal transformation costs from the layer before, shape ``(L, C)``."""
    tables = stage.transformation
    seen = np.zeros(tables.shape[:2], dtype=np.int64)  # before the first layer there is none
    for layer in range(1, stage.layers):
        if layer > 1 and np.array_equal(tables[layer], tables[layer - 1]):
            seen[layer] = seen[layer - 1]
        else:
            _, seen[layer] = np.unique(tables[layer], axis=1, return_inverse=True)
    return seen


@compiled
def _extend(
    labels: IntArray,
    rows: IntArray,
    allowed: BoolArray,
    layouts: IntArray,
    transformation: IntArray,
    repeats: int,
    prefix: IntArray,
    scales: tuple[int, int, int],
    limits: tuple[int, int, int],
) -> IntArray:
    """Put every strategy of one more layer in front of every label, unless limits or cutoff forbid it.

    Parameters
    ----------
    labels
        Shape ``(n, 7)``; a strategy of -1 is the empty plan behind the last layer.
    rows
        Cost, repeated time, forward, backward and state bytes of the layer, shape ``(5, S)``.
    allowed, layouts
        Of the strategies, shape ``(S,)``.
    transformation
        From this layer's layout to that of the next, shape ``(C, C)``.
    repeats
        How often the cost counts a transformation.
    prefix
        Least priced cost of the layers before, less the priced limit, shape ``(C,)``.
    scales
        Shift of the price, and the price of a byte of the peak and of the states.
    limits
        The scaled cutoff, and the remaining memory and repeated time for this layer and those behind it.
    """
    shift, peak_price, states_price = scales
    cutoff, memory_limit, repeated_limit = limits
    found = np.empty((256, 7), dtype=np.int64)
    count = 0
    for i in range(len(labels)):
        for s in range(len(allowed)):
            if not allowed[s]:
                continue
            handed = 0 if labels[i, 4] < 0 else transformation[layouts[s], layouts[labels[i, 4]]]
            peak = max(labels[i, 1] + rows[4, s] + rows[2, s] + rows[3, s], rows[4, s] + rows[2, s] + labels[i, 2])
            repeated = labels[i, 3] + rows[1, s] + handed
            if peak > memory_limit or repeated > repeated_limit:
                continue
            cost = labels[i, 0] + rows[0, s] + repeats * handed
            states = labels[i, 1] + rows[4, s]
            bound = (cost << shift) + peak_price * peak + states_price * states + prefix[layouts[s]]
            if bound > cutoff - (1 << shift):
                continue
            if count == len(found):
                longer = np.empty((2 * count, 7), dtype=np.int64)
                longer[:count] = found
                found = longer
            found[count, 0] = cost
            found[count, 1] = states
            found[count, 2] = peak
            found[count, 3] = repeated
            found[count, 4] = s
            found[count, 5] = i
            found[count, 6] = bound
            count += 1
    return found[:count].copy()


@compiled
def _undominated(labels: IntArray, layouts: IntArray, count: int) -> BoolArray:
    """Flags of the labels that no earlier one of the same layout dominates in states and peak.

    Labels are in order of their costs, so that none beats one before it; `layouts` are the classes of the strategies'
    layouts, as in :func:`_layouts_seen_before`, and `count` is their number. A Fenwick tree over states has the least
    peak of all labels so far whose states are no larger.
    """
    kept = np.ones(len(labels), dtype=np.bool_)
    layout = layouts[labels[:, 4]]
    for each in range(count):
        order = np.flatnonzero(layout == each)
        peaks = labels[order, 2]
        places = 1 + np.searchsorted(np.unique(labels[order, 1]), labels[order, 1])
        least = np.full(len(order) + 1, _NO_LIMIT)
        for k in range(len(order)):
            peak, place = peaks[k], places[k]
            while place > 0 and least[place] > peak:
                place -= place & -place
            if place > 0:
                kept[order[k]] = False
                continue
            place = places[k]
            while place <= len(order) and least[place] > peak:
                least[place] = peak
                place += place & -place
    return kept


@compiled
def _undominated_in_time(labels: IntArray, layouts: IntArray, count: int) -> BoolArray:
    """As :func:`_undominated`, in repeated time as well.

    Blocks of labels, each in the order of its states, are merged two by two, and those of the earlier block are set
    against those of the later one: a Fenwick tree over repeated times has the least peak of all labels so far whose
    states are no larger (Bentley's divide and conquer; n log^2 n for n labels).
    """
    kept = np.ones(len(labels), dtype=np.bool_)
    layout = layouts[labels[:, 4]]
    times = np.zeros(len(labels), dtype=np.int64)
    for each in range(count):
        order = np.flatnonzero(layout == each)
        times[order] = np.searchsorted(np.unique(labels[order, 3]), labels[order, 3])
        least = np.full(len(order) + 1, _NO_LIMIT)
        merged = np.empty_like(order)
        width = 1
        while width < len(order):
            for first in range(0, len(order) - width, 2 * width):
                middle, end = first + width, min(first + 2 * width, len(order))
                left = first
                for right in range(middle, end):
                    i = order[right]
                    while left < middle and labels[order[left], 1] <= labels[i, 1]:
                        merged[left + right - middle] = order[left]
                        place = times[order[left]] + 1
                        while place <= len(order):
                            least[place] = min(least[place], labels[order[left], 2])
                            place += place & -place
                        left += 1
                    merged[left + right - middle] = i
                    place = times[i] + 1
                    while place > 0:
                        kept[i] &= least[place] > labels[i, 2]
                        place -= place & -place
                for entered in range(first, left):
                    place = times[order[entered]] + 1
                    while place <= len(order):
                        least[place] = _NO_LIMIT
                        place += place & -place
                merged[left + end - middle : end] = order[left:middle]
                order[first:end] = merged[first:end]
            width *= 2
    return kept
