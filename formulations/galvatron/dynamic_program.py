"""Galvatron-BMW's dynamic program over one stage (Eq. 4, Algorithm 3), as printed or repaired.

The peak of a stage has a maximum in it (Eq. 2), so an exact table would need two memory dimensions. The paper tables
the least cost within a forward budget, ``sum(O_f + O_ms) <= E_fwd``, for every budget up to the limit, rebuilds the one
plan that its table holds for a budget, and accepts it where the plan's true peak keeps the limit. That is a heuristic:
another plan within the same budget may have a smaller peak.

Memory is counted in units: the bytes of a layer are rounded up, so plans keep the limit in bytes; a layer may need no
units. As printed, the state of the table lacks the strategy of the last layer, so the next layer pays for the strategy
that the table happened to choose. Repaired, the strategy is part of the state: O(layers * units * (strategies +
layouts^2)).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from formulations.galvatron.slips import REPAIRED, Slip
from formulations.galvatron.stage import StageProblem
from formulations.problem.compiled import compiled
from formulations.problem.strategy_problem import IntArray

__all__ = ["DEFAULT_UNIT_BYTES", "StagePlan", "search_stage", "unit_for"]

DEFAULT_UNIT_BYTES = 32 * 2**20
"""Granularity of memory."""

_FEWEST_UNITS = 8 * 2**30 // DEFAULT_UNIT_BYTES
"""Units in the smallest limit of the paper's tables."""

_IMPOSSIBLE = 2**62
_Pointers = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StagePlan:
    """Result of the search.

    Parameters
    ----------
    choices
        One strategy per layer; None where the search returns a cost without a plan (``ALG3_UNSET``).
    cost
        The cost that the search claims; that of `choices` where there are any.
    """

    choices: tuple[int, ...] | None
    cost: int


def unit_for(memory_limit: int) -> int:
    """Return the default unit in bytes, scaled down with the limit where that is below the paper's."""
    return max(1, min(DEFAULT_UNIT_BYTES, memory_limit // _FEWEST_UNITS))


def search_stage(stage: StageProblem, unit_bytes: int = DEFAULT_UNIT_BYTES, slips: Slip = REPAIRED) -> StagePlan | None:
    """Run Algorithm 3.

    Parameters
    ----------
    stage
        Layers and strategies.
    unit_bytes
        Granularity of memory, rounded up for layers and down for the limit.
    slips
        Of these, ``EQ4_STATE``, ``EQ4_BORDERS``, ``ALG3_BREAK`` and ``ALG3_UNSET`` are kept as printed.

    Returns
    -------
    StagePlan or None
        None where no plan is found; there may be one.

    Raises
    ------
    ValueError
        If the unit is not positive.
    """
    if unit_bytes < 1:
        raise ValueError(f"a unit of {unit_bytes} bytes; use a positive size, such as {DEFAULT_UNIT_BYTES}")
    budget = stage.memory_limit // unit_bytes
    units = -(-(stage.forward + stage.states) // unit_bytes)
    units[~stage.allowed] = budget + 1
    transformation = stage.repeats * stage.transformation
    chain = stage.cost, units, stage.layouts, transformation, budget, Slip.EQ4_BORDERS in slips
    table: _StateTable | _StatelessTable
    if Slip.EQ4_STATE in slips:
        table = _StatelessTable(*_fill_stateless(*chain), units)
    else:
        table = _StateTable(*_fill_states(*chain), units)
    return _largest_accepted(stage, table, unit_bytes, budget, slips)


@dataclass(frozen=True, slots=True, eq=False)
class _StateTable:
    """C(l, e, s): least cost of the first layers within a budget, by the strategy of the last of them."""

    costs: IntArray
    before: _Pointers
    units: IntArray

    def least(self) -> IntArray:
        """Least cost within every budget."""
        least: IntArray = self.costs.min(axis=1)
        return least

    def plan(self, budget: int) -> IntArray:
        """Strategies of that cost."""
        return _rebuild(self.before, self.units, int(self.costs[budget].argmin()), budget)


@dataclass(frozen=True, slots=True, eq=False)
class _StatelessTable:
    """C(l, e) as printed: least cost of the first layers within a budget, given the table's own choice before."""

    costs: IntArray
    choices: _Pointers
    units: IntArray

    def least(self) -> IntArray:
        """Least cost within every budget."""
        return self.costs

    def plan(self, budget: int) -> IntArray:
        """Strategies of that cost."""
        return _rebuild_stateless(self.choices, self.units, budget)


def _largest_accepted(
    stage: StageProblem, table: _StateTable | _StatelessTable, unit_bytes: int, budget: int, slips: Slip
) -> StagePlan | None:
    """The plan of the largest forward budget whose true peak keeps the limit, as larger budgets cost no more."""
    spare = int((-(-stage.backward[stage.allowed] // unit_bytes)).max(initial=0))
    unchecked = budget - spare
    lowest = max(unchecked + 1, 1) if Slip.ALG3_UNSET in slips else 0
    least = table.least()
    budgets = [e for e in range(lowest, budget + 1) if least[e] < _IMPOSSIBLE]
    bytes_of = stage.states, stage.forward, stage.backward
    best: IntArray | None = None
    if Slip.ALG3_BREAK in slips:
        for plan in map(table.plan, budgets):
            if _peak(*bytes_of, plan) > stage.memory_limit:
                break
            best = plan
    else:
        plans = map(table.plan, reversed(budgets))
        best = next((plan for plan in plans if _peak(*bytes_of, plan) <= stage.memory_limit), None)
    if best is not None:
        choices = tuple(best.tolist())
        return StagePlan(choices, stage.cost_of(choices))
    if Slip.ALG3_UNSET in slips and unchecked >= 0 and least[unchecked] < _IMPOSSIBLE:
        return StagePlan(None, int(least[unchecked]))
    return None


@compiled
def _peak(states: IntArray, forward: IntArray, backward: IntArray, choices: IntArray) -> int:
    """Peak of a plan, as :meth:`~formulations.galvatron.stage.StageProblem.peak` has it, for many plans."""
    held, resident, largest = 0, 0, 0
    for layer in range(len(choices)):
        held += forward[layer, choices[layer]]
        resident += states[layer, choices[layer]]
        largest = max(largest, held + backward[layer, choices[layer]])
    return largest + resident


@compiled
def _fill_states(
    cost: IntArray, units: IntArray, layouts: IntArray, transformation: IntArray, budget: int, borders_clash: bool
) -> tuple[IntArray, _Pointers]:
    """Fill C(l, e, s) layer by layer into two tables in turn: a layer may need no units and read its own row.

    Returns
    -------
    costs, before
        C of the last layer, shape ``(budget + 1, S)``, and the strategy of the layer before, ``(L, budget + 1, S)``.
    """
    layers, strategies = cost.shape
    count = transformation.shape[1]
    costs = np.full((budget + 1, strategies), _IMPOSSIBLE)
    following = np.full((budget + 1, strategies), _IMPOSSIBLE)
    before = np.zeros((layers, budget + 1, strategies), dtype=np.int32)
    by_layout = np.empty(count, dtype=np.int64)
    cheapest = np.empty(count, dtype=np.int32)
    reached = np.empty((budget + 1, count), dtype=np.int64)
    source = np.empty((budget + 1, count), dtype=np.int32)
    for e in range(budget + 1):
        for s in range(strategies):
            if units[0, s] < e or (units[0, s] == e and not borders_clash):
                costs[e, s] = cost[0, s]
    for layer in range(1, layers):
        for e in range(budget + 1):
            by_layout[:] = _IMPOSSIBLE
            for s in range(strategies):
                if costs[e, s] < by_layout[layouts[s]]:
                    by_layout[layouts[s]] = costs[e, s]
                    cheapest[layouts[s]] = s
            for after in range(count):
                reached[e, after] = _IMPOSSIBLE
                for i in range(count):
                    if by_layout[i] < _IMPOSSIBLE:
                        total = by_layout[i] + transformation[layer, i, after]
                        if total < reached[e, after]:
                            reached[e, after] = total
                            source[e, after] = cheapest[i]
        for e in range(budget + 1):
            for s in range(strategies):
                rest = e - units[layer, s]
                following[e, s] = _IMPOSSIBLE
                if rest >= 0 and e >= borders_clash and reached[rest, layouts[s]] < _IMPOSSIBLE:
                    following[e, s] = reached[rest, layouts[s]] + cost[layer, s]
                    before[layer, e, s] = source[rest, layouts[s]]
        costs, following = following, costs
    return costs, before


@compiled
def _fill_stateless(
    cost: IntArray, units: IntArray, layouts: IntArray, transformation: IntArray, budget: int, borders_clash: bool
) -> tuple[IntArray, _Pointers]:
    """Fill C(l, e) as printed, with the strategy that the table chose before.

    Returns
    -------
    costs, choices
        C of the last layer, shape ``(budget + 1,)``, and the chosen strategies, ``(L, budget + 1)``.
    """
    layers, strategies = cost.shape
    costs = np.zeros(budget + 1, dtype=np.int64)
    following = np.empty(budget + 1, dtype=np.int64)
    choices = np.zeros((layers, budget + 1), dtype=np.int32)
    if borders_clash:
        costs[0] = _IMPOSSIBLE
    for layer in range(layers):
        for e in range(budget + 1):
            following[e] = _IMPOSSIBLE
            for s in range(strategies):
                rest = e - units[layer, s]
                if rest < 0 or e < borders_clash or costs[rest] >= _IMPOSSIBLE:
                    continue
                total = costs[rest] + cost[layer, s]
                if layer > 0:
                    total += transformation[layer, layouts[choices[layer - 1, rest]], layouts[s]]
                if total < following[e]:
                    following[e] = total
                    choices[layer, e] = s
        costs, following = following, costs
    return costs, choices


@compiled
def _rebuild(before: _Pointers, units: IntArray, last: int, budget: int) -> IntArray:
    """Follow the pointers of :func:`_fill_states` from the last layer's strategy."""
    layers = len(before)
    choices = np.empty(layers, dtype=np.int64)
    for layer in range(layers - 1, -1, -1):
        choices[layer] = last
        previous = before[layer, budget, last]
        budget -= units[layer, last]
        last = previous
    return choices


@compiled
def _rebuild_stateless(chosen: _Pointers, units: IntArray, budget: int) -> IntArray:
    """Follow the choices of :func:`_fill_stateless` from the last layer."""
    layers = len(chosen)
    choices = np.empty(layers, dtype=np.int64)
    for layer in range(layers - 1, -1, -1):
        choices[layer] = chosen[layer, budget]
        budget -= units[layer, choices[layer]]
    return choices
