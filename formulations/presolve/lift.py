"""The way back: what each removed node chooses, given the nodes that remained after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from formulations.problem import IntArray, StrategyProblem


@dataclass(frozen=True, slots=True, eq=False)
class Follow:
    """A node whose choice follows from those of other nodes.

    Parameters
    ----------
    node, others
        Original indices; ``others`` were decisions when ``node`` was removed, and may follow from later ones.
    strategies
        Per other node the original strategies that it had then, ascending.
    choice
        The original strategy of ``node`` for each combination, one axis per other node.
    """

    node: int
    others: tuple[int, ...]
    strategies: tuple[IntArray, ...]
    choice: IntArray


@dataclass(frozen=True, slots=True, eq=False)
class Lift:
    """From choices of the reduced problem to choices of the original one, and back where that is possible.

    Parameters
    ----------
    nodes
        Original index per node of the reduced problem, or -1 where it stands for none.
    strategies
        Original strategies per node of the reduced problem, ascending.
    follows
        In order of removal.
    original_nodes
        Number of nodes of the original problem.
    """

    nodes: tuple[int, ...]
    strategies: tuple[IntArray, ...]
    follows: tuple[Follow, ...]
    original_nodes: int

    @classmethod
    def identity(cls, problem: StrategyProblem) -> Lift:
        """Return the lift of a problem that was not reduced."""
        strategies = tuple(np.arange(node.size, dtype=np.int64) for node in problem.nodes)
        return cls(tuple(range(len(problem.nodes))), strategies, (), len(problem.nodes))

    def __call__(self, choices: Sequence[int]) -> tuple[int, ...]:
        """Return the original choices: same cost up to the offset, same usage wherever a limit can bind."""
        lifted = [0] * self.original_nodes
        for node, strategies, choice in zip(self.nodes, self.strategies, choices, strict=True):
            if node >= 0:
                lifted[node] = int(strategies[choice])
        for follow in reversed(self.follows):
            place = tuple(
                int(strategies.searchsorted(lifted[other]))
                for other, strategies in zip(follow.others, follow.strategies, strict=True)
            )
            lifted[follow.node] = int(follow.choice[place])
        return tuple(lifted)

    def project(self, original: Sequence[int]) -> tuple[int, ...] | None:
        """Return the choices of the nodes that remain, or None where one uses a removed strategy."""
        choices = []
        for node, strategies in zip(self.nodes, self.strategies, strict=True):
            wanted = 0 if node < 0 else original[node]
            place = int(np.searchsorted(strategies, wanted))
            if place == len(strategies) or strategies[place] != wanted:
                return None
            choices.append(place)
        return tuple(choices)
