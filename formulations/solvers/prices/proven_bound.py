"""The bound of a price ascent in exact integers, evaluated again only where the ascent has got further."""

from __future__ import annotations

import numpy as np

from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.prices.ascent import PriceAscent
from formulations.solvers.prices.dual_bound import exact_bound
from formulations.solvers.protocol.exchange import EXCHANGE


class ProvenBound:
    """The best exact bound on a problem, from one ascent and from whatever else proves one.

    Parameters
    ----------
    problem, ascent
        The problem, and an ascent on its flat form.

    Attributes
    ----------
    value
        No assignment within the limits costs less; None before the first proof.
    """

    def __init__(self, problem: StrategyProblem, ascent: PriceAscent) -> None:
        self.value: int | None = None
        self._problem, self._ascent = problem, ascent
        self._evaluated_at = -np.inf

    @property
    def known(self) -> int | None:
        """The best of :attr:`value` and what other solvers proved meanwhile: enough to stop, not ours to claim."""
        return EXCHANGE.bound(self._problem, self.value)

    def raise_to(self, bound: int) -> None:
        """Take over a bound that was proved in another way, if it is better."""
        self.value = bound if self.value is None else max(self.value, bound)

    def evaluate(self) -> None:
        """Evaluate the best prices and messages, if they are better than those evaluated last."""
        ascent = self._ascent
        if ascent.best_bound > self._evaluated_at:
            self._evaluated_at = ascent.best_bound
            self.raise_to(exact_bound(self._problem, ascent.flat, ascent.best_prices, ascent.best_messages))
