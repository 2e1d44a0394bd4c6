"""Incumbent exchange: the newest assignment and the best bound that other solvers have published.

A worker process has one exchange. An assignment in it is unchecked, and a bound in it is proven. A solver that can use
them reads them when it suits; other solvers ignore them. A solver may run another one on a different problem in the
same process (a core, a part, a relaxation), where updates on the whole problem have another meaning. So every reader
names its problem and receives updates on that problem alone.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from formulations.problem.strategy_problem import StrategyProblem

Translation = Callable[[tuple[int, ...]], tuple[int, ...] | None]


@dataclass(frozen=True, slots=True)
class Update:
    """A better assignment, a better bound, or both; None where nothing is new."""

    choices: tuple[int, ...] | None = None
    bound: int | None = None

    def updated(self, later: Update) -> Update:
        """Return what is known once ``later`` has arrived too."""
        choices = self.choices if later.choices is None else later.choices
        return Update(choices, self.bound if later.bound is None else later.bound)


@dataclass(frozen=True, slots=True)
class _Subscription:
    """The problem that updates are read for, and their translation to it."""

    problem: StrategyProblem
    translate: Translation
    offset: int


class IncumbentExchange:
    """Keeps the newest assignment until it is taken, and the best bound; written by one thread, read by another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._update = Update()
        self._subscription: _Subscription | None = None

    def publish(self, update: Update) -> None:
        """Replace the assignment or the bound that is there, or both."""
        with self._lock:
            self._update = self._update.updated(update)

    def empty(self) -> None:
        """Forget everything."""
        with self._lock:
            self._update = Update()

    def take(self, problem: StrategyProblem) -> tuple[int, ...] | None:
        """Return the newest assignment of a problem and forget it, or None."""
        subscription = self._subscription
        if subscription is None or subscription.problem is not problem:
            return None
        with self._lock:
            newest, self._update = self._update.choices, Update(bound=self._update.bound)
        return None if newest is None else subscription.translate(newest)

    def bound(self, problem: StrategyProblem, own: int | None = None) -> int | None:
        """Return the best proven bound on the cost of a problem, of other solvers and the caller's ``own``, or None."""
        subscription = self._subscription
        if subscription is None or subscription.problem is not problem:
            return own
        with self._lock:
            bound = self._update.bound
        if bound is None:
            return own
        return bound - subscription.offset if own is None else max(own, bound - subscription.offset)

    @contextlib.contextmanager
    def subscribed_to(self, problem: StrategyProblem) -> Iterator[None]:
        """Read updates as those of this problem."""
        with self._subscribed(_Subscription(problem, lambda choices: choices, 0)):
            yield

    @contextlib.contextmanager
    def translated(self, problem: StrategyProblem, translate: Translation, offset: int) -> Iterator[None]:
        """Translate every update that is received inside the block to another problem.

        Parameters
        ----------
        problem
            Problem to whose assignments and costs updates are translated.
        translate
            Maps an assignment of the current problem to one of ``problem``, or to None where there is none.
        offset
            Cost of an assignment of the current problem, less that of the assignment it is mapped to.
        """
        outer = self._subscription
        if outer is None:
            yield
            return

        def through(choices: tuple[int, ...]) -> tuple[int, ...] | None:
            known = outer.translate(choices)
            return None if known is None else translate(known)

        with self._subscribed(_Subscription(problem, through, outer.offset + offset)):
            yield

    @contextlib.contextmanager
    def _subscribed(self, subscription: _Subscription) -> Iterator[None]:
        before, self._subscription = self._subscription, subscription
        try:
            yield
        finally:
            self._subscription = before


EXCHANGE = IncumbentExchange()
"""The exchange of this process."""
