"""Search for cheap feasible assignments at memory prices: settle, repair and fill."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import numpy as np

from formulations.encodings.flat import FlatProblem, FloatArray
from formulations.encodings.priced_costs import PricedCosts
from formulations.problem.strategy_problem import IntArray, StrategyProblem
from formulations.solvers.local_search.feasibility import find_feasible
from formulations.solvers.local_search.moves import conflicts, improve_nodes, settle, total_cost, usage_of
from formulations.solvers.local_search.repair import repair
from formulations.solvers.local_search.tree_moves import tree_search
from formulations.solvers.local_search.tunables import FILL_FACTORS, MOVES_AT_ONCE, REPAIRED_ROWS
from formulations.solvers.protocol.exchange import EXCHANGE

_REPAIR = True
"""Technique: greedy repair of assignments that exceed a limit."""

_FORCING = True
"""Technique: a search that puts violations before cost, where nothing feasible is known."""


class IncumbentSearch:
    """Working copies of priced costs, and the best feasible assignment found so far.

    Parameters
    ----------
    problem, flat
        The problem and its flat form (without contradiction).
    found
        Called with every better assignment (original strategies) and its exact objective.
    deadline
        Of :func:`time.monotonic`; after it, filling stops at the next opportunity.

    Attributes
    ----------
    best, objective
        The incumbent in flat choices and its exact objective, or None.
    """

    def __init__(
        self,
        problem: StrategyProblem,
        flat: FlatProblem,
        found: Callable[[tuple[int, ...], int], None],
        deadline: float = math.inf,
    ) -> None:
        self.problem = problem
        self.flat = flat
        self.best: IntArray | None = None
        self.objective: int | None = None
        self._found = found
        self._deadline = deadline
        self._rows = flat.usage
        self._best_cost = np.inf
        self._costs = PricedCosts(flat)
        self._unary, self._tables = self._costs.unary, self._costs.tables
        # Costs are integers: half of one is an improvement, unless float sums are coarser than that.
        self._tolerance = max(0.25, 1e-19 * flat.penalty)
        self._order: IntArray = np.arange(len(flat.graph.sizes), dtype=np.int64)

    def extend(self, deadline: float) -> None:
        """Move the time (of :func:`time.monotonic`) after which filling stops."""
        self._deadline = deadline

    def set_prices(self, prices: FloatArray) -> None:
        """Add prices per unit of usage to the costs that all moves see."""
        self._costs.set(prices)

    def usage(self, choices: IntArray) -> FloatArray:
        """Return the usage of every row."""
        return usage_of(self.flat.graph, self._rows, choices)

    def settle(self, choices: IntArray, rounds: int = 5) -> None:
        """Improve single nodes at the prices set, limits ignored."""
        settle(self.flat.graph, self._unary, self._tables, choices, self._order, rounds)

    def grow_trees(self, choices: IntArray, work: int, largest: int) -> float:
        """Improve by random trees at the prices set, limits ignored; return the gain."""
        flat = self.flat
        now = np.zeros(0)
        tolerance = self._tolerance
        return tree_search(
            flat.graph, self._rows, self._unary, self._tables, choices, now, work, 20, largest, False, tolerance
        )

    def grow_feasible_trees(self, choices: IntArray, usage_now: FloatArray, work: int, largest: int) -> float:
        """Improve by random trees at the prices set, within the limits; return the gain."""
        flat = self.flat
        tolerance = self._tolerance
        return tree_search(
            flat.graph, self._rows, self._unary, self._tables, choices, usage_now, work, 2, largest, True, tolerance
        )

    def improve(self, choices: IntArray, usage_now: FloatArray, rounds: int) -> int:
        """Improve single nodes at the prices set, within the limits; return the number of moves."""
        flat = self.flat
        return improve_nodes(
            flat.graph, self._rows, self._unary, self._tables, choices, usage_now, rounds, self._tolerance
        )

    def repair(self, choices: IntArray, usage_now: FloatArray, prices: FloatArray) -> bool:
        """Bring ``choices`` under the limits; return whether that worked."""
        if not _REPAIR:
            return False
        self.set_prices(prices)
        flat = self.flat
        return repair(flat.graph, self._rows, self._unary, self._tables, choices, usage_now, REPAIRED_ROWS)

    def fill(
        self, choices: IntArray, usage_now: FloatArray, prices: FloatArray, factors: tuple[float, ...] = FILL_FACTORS
    ) -> None:
        """Spend what memory is left: feasible moves while the prices fall to zero; then offer the result."""
        for factor in factors:
            self.set_prices(prices * factor)
            self.improve(choices, usage_now, 4 if factor else 12)
            if time.monotonic() > self._deadline:
                break
        self.offer(choices)

    def _leave_room_for_rounding(self) -> None:
        """Lower the limits by what the coarse quantum may hide, from the first time that it hid something."""
        limit = self.flat.usage.limit - float(len(self.flat.usage.low))
        self._rows = self.flat.usage._replace(limit=np.maximum(limit, 0.0))

    def finish(self, choices: IntArray, prices: FloatArray) -> IntArray | None:
        """Repair a copy of ``choices`` where needed, and fill; return it, or None where it is not feasible."""
        candidate = choices.copy()
        usage_now = self.usage(candidate)
        if (usage_now > self._rows.limit).any() and not self.repair(candidate, usage_now, prices):
            return None
        self.fill(candidate, usage_now, prices)
        return candidate if self.is_feasible(candidate) else None

    def finish_grown(
        self, choices: IntArray, prices: FloatArray, visits: int = 10, bias: FloatArray | None = None
    ) -> IntArray | None:
        """Improve ``choices`` at prices, single nodes first and random trees after them; then :meth:`finish` a copy.

        The trees visit every node so many times on average. Strategies cost ``bias`` more while they are improved.
        """
        self.set_prices(prices)
        if bias is not None:
            self._unary += bias
        self.settle(choices)
        self.grow_trees(choices, visits * len(choices), 4000)
        return self.finish(choices, prices)

    def rebuild(self, choices: IntArray, prices: FloatArray, random: np.random.Generator) -> IntArray:
        """Rebuild parts of feasible ``choices`` at noisy prices, within the limits; return the result, a copy."""
        noise = random.uniform(0.0, 0.8) * random.standard_normal(len(prices))
        noisy = prices * random.uniform(0.4, 1.5) * np.exp(noise)
        candidate = choices.copy()
        usage = self.usage(candidate)
        self.set_prices(noisy)
        self.improve(candidate, usage, 1)
        largest = int(np.exp(random.uniform(np.log(5), np.log(300))))
        self.grow_feasible_trees(candidate, usage, 2 * len(candidate), largest)
        self.fill(candidate, usage, noisy, FILL_FACTORS[1:])
        return candidate

    def rebuild_while_better(
        self, choices: IntArray, prices: FloatArray, random: np.random.Generator, patience: int
    ) -> IntArray:
        """Rebuild feasible ``choices`` until so many rounds in a row make nothing cheaper; return the cheapest."""
        graph, unary, tables = self.flat.graph, self.flat.unary, self.flat.tables
        cost, idle = total_cost(graph, unary, tables, choices), 0
        while idle < patience and time.monotonic() < self._deadline:
            candidate = self.rebuild(choices, prices, random)
            now = total_cost(graph, unary, tables, candidate)
            idle = 0 if now < cost - self._tolerance else idle + 1
            if now <= cost:
                choices, cost = candidate, now
        return choices

    def force_feasible(self, choices: IntArray, steps: int, deadline: float) -> bool:
        """Look for any feasible assignment near ``choices`` (violations before cost), then fill and offer it.

        Gives up after ``steps`` moves, or at ``deadline`` (of :func:`time.monotonic`).
        """
        if not _FORCING:
            return False
        flat = self.flat
        candidate = choices.copy()
        no_prices = np.zeros(len(self._rows.limit))
        self.set_prices(no_prices)
        weights = np.ones(len(self._rows.limit)), np.ones(len(flat.graph.arity))
        costs = self._unary, self._tables, flat.penalty
        for _ in range(0, steps, MOVES_AT_ONCE):
            if find_feasible(flat.graph, self._rows, *costs, candidate, *weights, MOVES_AT_ONCE):
                self.fill(candidate, self.usage(candidate), no_prices)
                return True
            if time.monotonic() > deadline:
                break
        return False

    def is_feasible(self, choices: IntArray) -> bool:
        """Return whether limits hold (to the flat problem's quantum) and nothing forbidden is chosen."""
        flat = self.flat
        if conflicts(flat.graph, flat.tables, flat.penalty, choices):
            return False
        return not (self.usage(choices) > self._rows.limit).any()

    def offer(self, choices: IntArray) -> bool:
        """Keep ``choices`` if it is feasible and cheaper than the incumbent."""
        flat = self.flat
        cost = total_cost(flat.graph, flat.unary, flat.tables, choices)
        if cost > self._best_cost + self._tolerance or not self.is_feasible(choices):
            return False
        original = flat.original_choices(choices)
        if max(flat.rows.quantum, default=1) > 1 and not within_limits(self.problem, original):
            self._leave_room_for_rounding()
            return False
        objective = exact_objective(self.problem, original)
        if self.objective is not None and objective >= self.objective:
            return False
        self.best, self.objective, self._best_cost = choices.copy(), objective, cost
        self._found(original, objective)
        return True

    def offer_original(self, choices: tuple[int, ...]) -> None:
        """Offer an assignment of the problem itself."""
        found = self.flat.flat_choices(choices)
        if found is not None:
            self.offer(found)

    def import_incumbent(self) -> None:
        """Take over what another solver found meanwhile, if it is better."""
        found = EXCHANGE.take(self.problem)
        if found is not None:
            self.offer_original(found)


def exact_objective(problem: StrategyProblem, choices: tuple[int, ...]) -> int:
    """Return the cost of an assignment as a Python integer."""
    total = sum(int(node.cost[choice]) for node, choice in zip(problem.nodes, choices, strict=True))
    return total + sum(int(factor.cost[tuple(choices[i] for i in factor.scope)]) for factor in problem.factors)


def within_limits(problem: StrategyProblem, choices: tuple[int, ...]) -> bool:
    """Return whether all limits hold, in Python integers; slow, for amounts beyond the range of float64."""
    events: list[dict[int, int]] = [{} for _ in problem.resources]
    for scope, term in problem.usage_terms():
        amount = int(term.amount[tuple(choices[i] for i in scope)])
        if amount and term.start < term.end:
            change = events[term.resource]
            change[term.start] = change.get(term.start, 0) + amount
            change[term.end] = change.get(term.end, 0) - amount
    for resource, change in zip(problem.resources, events, strict=True):
        usage = 0
        for event in sorted(change):
            usage += change[event]
            if resource.limit is not None and usage > resource.limit:
                return False
    return True
