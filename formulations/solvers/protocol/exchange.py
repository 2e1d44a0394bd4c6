"""What other solvers found meanwhile, as the solver of this process sees it: their assignments and their bounds.

A worker process has one mailbox. What arrives is the best assignment of someone else, checked by nobody here, and
the best bound that someone proved: a solver that can use them looks at its convenience, the others never do.
A solver may let another one work on a different problem in the same process (a core, a part, a relaxation), where
news of the whole would mean something else. So whoever asks names the problem, and hears only of that one.
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
    """A better assignment, a better bound, or both; None where there is no news."""

    choices: tuple[int, ...] | None = None
    bound: int | None = None

    def updated(self, later: Update) -> Update:
        """Return what is known once ``later`` has arrived too."""
        choices = self.choices if later.choices is None else later.choices
        return Update(choices, self.bound if later.bound is None else later.bound)


@dataclass(frozen=True, slots=True)
class _Address:
    """A problem that news are for, and what they mean there."""

    problem: StrategyProblem
    translate: Translation
    offset: int


class IncumbentExchange:
    """Keeps the newest assignment until it is taken, and the best bound; written by one thread, read by another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._news = Update()
        self._address: _Address | None = None

    def put(self, news: Update) -> None:
        """Replace the assignment or the bound that is there, or both."""
        with self._lock:
            self._news = self._news.updated(news)

    def empty(self) -> None:
        """Forget everything."""
        with self._lock:
            self._news = Update()

    def take(self, problem: StrategyProblem) -> tuple[int, ...] | None:
        """Return the newest assignment of a problem and forget it, or None."""
        address = self._address
        if address is None or address.problem is not problem:
            return None
        with self._lock:
            newest, self._news = self._news.choices, Update(bound=self._news.bound)
        return None if newest is None else address.translate(newest)

    def bound(self, problem: StrategyProblem, own: int | None = None) -> int | None:
        """Return the best of what others and who asks (``own``) proved about the cost of a problem, or None."""
        address = self._address
        if address is None or address.problem is not problem:
            return own
        with self._lock:
            bound = self._news.bound
        if bound is None:
            return own
        return bound - address.offset if own is None else max(own, bound - address.offset)

    @contextlib.contextmanager
    def subscribed_to(self, problem: StrategyProblem) -> Iterator[None]:
        """Let what arrives be about this problem."""
        with self._addressed(_Address(problem, lambda choices: choices, 0)):
            yield

    @contextlib.contextmanager
    def translated(self, problem: StrategyProblem, translate: Translation, offset: int) -> Iterator[None]:
        """Hand out what arrives as news of another problem instead.

        Parameters
        ----------
        problem
            Every assignment of it is one of the problem so far that costs ``offset`` more.
        translate
            Makes its assignments from those that arrive; None where it cannot.
        """
        outer = self._address
        if outer is None:
            yield
            return

        def through(choices: tuple[int, ...]) -> tuple[int, ...] | None:
            known = outer.translate(choices)
            return None if known is None else translate(known)

        with self._addressed(_Address(problem, through, outer.offset + offset)):
            yield

    @contextlib.contextmanager
    def _addressed(self, address: _Address) -> Iterator[None]:
        before, self._address = self._address, address
        try:
            yield
        finally:
            self._address = before


EXCHANGE = IncumbentExchange()
"""The mailbox of this process."""
