"""A step's problem with some decisions fixed or forbidden, and with them all problems around it.

A pin leaves an operator some of its layouts and some of the ways to hold its outputs: keep, run again, offload. Every
plan of the pinned problem is one of the problem itself. So a lower bound of the problem holds for the pinned one too,
and decisions of the pinned problem are a start of the problem.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache

import numpy as np

from formulations.problem.strategy_problem import BoolArray, StrategyProblem
from formulations.step.solving.step_problem import Choices, Reruns, StepProblem
from formulations.step.training_step import StepDecision


class Holding(StrEnum):
    """How the outputs of an operator are there for backward."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    OFFLOAD = "offload"


ALL_HOLDINGS = frozenset(Holding)


@dataclass(frozen=True, slots=True, eq=False)
class Allowed:
    """What is left to one node of the model.

    Parameters
    ----------
    layouts
        Flag per layout, shape ``(S,)``.
    holdings
        Ways to hold its outputs.
    """

    layouts: BoolArray
    holdings: frozenset[Holding] = ALL_HOLDINGS

    def flags(self, size: int, reruns: int) -> BoolArray:
        """Flag per strategy, shape ``(size,)``, of a node with so many modes of running again."""
        modes = size // self.layouts.shape[0]
        held = np.array([holding_of(mode, reruns) in self.holdings for mode in range(modes)], dtype=np.bool_)
        return (held[:, None] & self.layouts[None, :]).ravel()

    def allows(self, layout: int, holding: Holding) -> bool:
        """Whether a layout with a way to hold the outputs is left."""
        return bool(self.layouts[layout]) and holding in self.holdings


Pins = Mapping[int, Allowed]
"""Pinned nodes of the model."""


def holding_of(mode: int, reruns: int) -> Holding:
    """How outputs are held in a mode: keep first, then the modes of running again, then those of offload."""
    if mode == 0:
        return Holding.KEEP
    return Holding.RECOMPUTE if mode <= reruns else Holding.OFFLOAD


def pinned(built: StepProblem, pins: Pins) -> StepProblem:
    """Return a problem with fewer strategies, and the problems around it with fewer of theirs.

    Parameters
    ----------
    built
        The problem of a step.
    pins
        What is left to some nodes. Where one may only run again, it has to be an operator that backward reads: a
        rerun whose outputs are not read is no part of a decision.

    Returns
    -------
    StepProblem
        Its decisions are those of ``built`` that keep the pins; it leaves out all others. A problem around it that
        no decision is left of has none: its solver finds it infeasible.
    """
    if not pins:
        return built
    reruns = {i: len(built.modes.get(i, ())) for i in pins}

    def encode(decision: StepDecision) -> Choices:
        choices = built.encode(decision)
        for i, left in pins.items():
            mode, layout = divmod(choices[i], built.layouts[i])
            if not left.allows(layout, holding_of(mode, reruns[i])):
                raise ValueError(f"node {i} of the decision is pinned to something else")
        return choices

    relaxation, overestimate, merged = built.relaxation, built.overestimate, built.merged
    may_keep = all(Holding.KEEP in left.holdings for left in pins.values())
    stays = all(left.holdings != {Holding.OFFLOAD} for left in pins.values())
    return replace(
        built,
        build=cache(lambda: _without(built.problem, pins, reruns)),
        encode=encode,
        overestimate=None if overestimate is None else lambda: pinned(overestimate(), pins),
        relaxation=None if relaxation is None else lambda cost: _without(relaxation(cost), pins, reruns),
        restrictions=tuple(_around(build, pins) for build in built.restrictions),
        # Without a limit nothing runs again and nothing is offloaded: where some operator has to, it is no start.
        unlimited=_around(built.unlimited, pins) if may_keep and built.unlimited is not None else None,
        rules=tuple(rule for rule in built.rules if _keeps(rule, pins)),
        base_problem=_around(built.base_problem, pins) if stays and built.base_problem is not None else None,
        merged=None if merged is None else replace(merged, pin=lambda relaxed: pinned(relaxed, pins)),
    )


def _around(build: Callable[[], StepProblem], pins: Pins) -> Callable[[], StepProblem]:
    return cache(lambda: pinned(build(), pins))


def _keeps(rule: Reruns, pins: Pins) -> bool:
    """Whether the reruns of a rule keep the pins."""
    return all((Holding.RECOMPUTE if i in rule else Holding.KEEP) in left.holdings for i, left in pins.items())


def _without(problem: StrategyProblem, pins: Pins, reruns: Mapping[int, int]) -> StrategyProblem:
    nodes = list(problem.nodes)
    for i, left in pins.items():
        others, known = ~left.flags(nodes[i].size, reruns[i]), nodes[i].forbidden
        nodes[i] = replace(nodes[i], forbidden=others if known is None else known | others)
    return replace(problem, nodes=tuple(nodes))
