"""The canonical problem of a step, the decisions of its solutions, and related problems."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from formulations.problem.strategy_problem import BoolArray, StrategyProblem
from formulations.step.holds import shortest_holds
from formulations.step.modes import Modes
from formulations.step.training_step import StepDecision

if TYPE_CHECKING:
    from formulations.step.solving.merged_moments import MergedMoments

Choices = tuple[int, ...]
Reruns = Mapping[int, int]
"""Operators that run again, each with the moment at which it does."""


@dataclass(frozen=True)
class StepProblem:
    """The canonical problem of a step, with conversions between its choices and decisions.

    Parameters
    ----------
    build
        Builds the problem, whose first nodes are the model's nodes; called where it is first needed, and cached.
    memory_limit
        Bytes on one device, or None.
    decode
        From choices to the decision.
    encode
        From a decision to choices of the model's nodes; raises ValueError for one the problem leaves out.
    layouts
        Number of layouts of every node of the model; strategy ``mode * layouts + layout``.
    overestimate
        Builds the same problem with bytes rounded up, where this one may count too few.
    relaxation
        From a plan's cost to a problem whose bounds hold for all plans of at most that cost, where the problem itself
        leaves some of them out.
    restrictions
        Build smaller problems whose decisions this one contains, the largest first: solved before it or beside it.
    unlimited
        Builds the problem without a limit, and without reruns since these only add cost, where there are layouts to
        decide.
    rules
        Reruns by rule that this problem contains for any layouts: the first that are tried.
    base_problem
        Builds the problem that this one extends by further decisions, about as hard: solved beside a deep one.
    merged
        Relaxations with merged moments, where they are much smaller: a bound and good decisions come from them first.
    complete
        From choices of the model's nodes to choices of the whole problem, or of the same with fewer strategies allowed.
    modes
        Modes of running again per node of the model; of the modes of a strategy, keep comes before them, offload after.
    """

    build: Callable[[], StrategyProblem]
    memory_limit: int | None
    decode: Callable[[Choices], StepDecision]
    encode: Callable[[StepDecision], Choices]
    layouts: tuple[int, ...]
    overestimate: Callable[[], StepProblem] | None = None
    relaxation: Callable[[int], StrategyProblem] | None = None
    restrictions: tuple[Callable[[], StepProblem], ...] = ()
    unlimited: Callable[[], StepProblem] | None = None
    rules: tuple[Reruns, ...] = ()
    base_problem: Callable[[], StepProblem] | None = None
    merged: MergedMoments | None = None
    complete: Callable[[StrategyProblem, Choices], Choices] = shortest_holds
    modes: Modes = field(default_factory=dict)

    @property
    def problem(self) -> StrategyProblem:
        """The canonical problem under the limit."""
        return self.build()

    @property
    def has_one_layout(self) -> bool:
        """Whether every operator has a single layout."""
        return max(self.layouts) == 1

    @property
    def has_smaller(self) -> bool:
        """Whether there are smaller problems or rules to begin from."""
        return bool(self.restrictions or self.rules or self.unlimited)

    def contains(self, decision: StepDecision) -> bool:
        """Whether the problem does not leave a decision out."""
        try:
            self.encode(decision)
        except ValueError:
            return False
        return True

    def encoded(self, decision: StepDecision) -> Choices:
        """Choices of the whole problem for a decision, with the shortest holds.

        Raises
        ------
        ValueError
            If the problem leaves the decision out.
        """
        return self.complete(self.problem, self.encode(decision))

    def only(self, allowed: Mapping[int, BoolArray]) -> StepProblem:
        """The same problem with only some layouts, flags of shape ``(S,)``, or strategies of some nodes."""
        overestimate = self.overestimate
        return StepProblem(
            cache(lambda: _with_only(self.problem, allowed)),
            self.memory_limit,
            self.decode,
            self.encode,
            self.layouts,
            None if overestimate is None else lambda: overestimate().only(allowed),
            complete=self.complete,
            modes=self.modes,
        )

    def with_layouts_of(self, decision: StepDecision) -> StepProblem:
        """The problem with every layout as in a decision."""
        return self.only({i: np.arange(self.layouts[i]) == k for i, k in enumerate(decision.layouts)})

    def with_reruns_of(self, decision: StepDecision) -> StepProblem:
        """The problem with everything but layouts as in a decision."""
        allowed = {}
        for i, choice in enumerate(self.encode(decision)):
            size = self.layouts[i]
            allowed[i] = np.arange(self.problem.nodes[i].size) // size == choice // size
        return self.only(allowed)


def _with_only(problem: StrategyProblem, allowed: Mapping[int, BoolArray]) -> StrategyProblem:
    nodes = list(problem.nodes)
    for i, flags in allowed.items():
        others = ~_repeated(flags, nodes[i].size)
        known = nodes[i].forbidden
        nodes[i] = replace(nodes[i], forbidden=others if known is None else known | others)
    return replace(problem, nodes=tuple(nodes))


def _repeated(flags: BoolArray, size: int) -> BoolArray:
    """Flags per layout, repeated over the modes."""
    return np.tile(flags, size // flags.shape[0])
