"""Earlier incumbents of a search, executed where the last one disappoints.

Executed, a decision may cost more than its problem says, or hold more: copies wait for room, or memory was counted
too low. Then one that the problem holds to be a little dearer is often cheaper.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from formulations.problem.solution import Progress
from formulations.step.sharding import MEMORY
from formulations.step.solving.registry import StepProblem
from formulations.step.solving.smaller import Executed, Start
from formulations.step.training_step import StepDecision

_MOST = 3
"""Earlier incumbents that are executed at most."""


class Incumbents:
    """What a search of a problem reported.

    Parameters
    ----------
    built
        The problem.
    execute
        Executes a decision.
    """

    def __init__(self, built: StepProblem, execute: Callable[[StepDecision], Executed]) -> None:
        self._built, self._execute = built, execute
        self._heard: list[tuple[int, tuple[int, ...]]] = []

    def hear(self, line: Progress) -> None:
        """Take a line of progress."""
        if line.choices is not None and line.incumbent is not None:
            self._heard.append((line.incumbent, line.choices))

    def cheapest_before_last(self, known: Start | None, deadline: float) -> Start | None:
        """The cheapest within the limit, of ``known`` and the incumbents before the last one.

        Parameters
        ----------
        known
            The best decision within the limit that has been executed, if any.
        deadline
            Of :func:`time.monotonic`; after it nothing more is executed.
        """
        limit = self._built.problem.resources[MEMORY].limit
        for cost, choices in self._heard[-2 : -2 - _MOST : -1]:
            if time.monotonic() > deadline or (known is not None and cost >= known.executed.cost):
                break
            decision = self._built.decode(choices)
            executed = self._execute(decision)
            fits = limit is None or executed.peak <= limit
            if fits and (known is None or executed.cost < known.executed.cost):
                known = Start(decision, executed)
        return known
