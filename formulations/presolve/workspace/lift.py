"""The way back: what each removed node chooses, given the nodes that remained after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from formulations.problem.strategy_problem import IntArray, StrategyProblem


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

    def lift(self, choices: list[int]) -> None:
        """Write the node's choice, from those of the others."""
        place = tuple(
            int(strategies.searchsorted(choices[other]))
            for other, strategies in zip(self.others, self.strategies, strict=True)
        )
        choices[self.node] = int(self.choice[place])


@dataclass(frozen=True, slots=True, eq=False)
class Tied:
    """Many nodes at once, each of which follows one that none of them leads, or has one strategy.

    Parameters
    ----------
    nodes, leaders
        Original indices; a node with one strategy is its own leader.
    begin, choice
        The original strategy of ``nodes[k]`` is ``choice[begin[k] + p]``, where the leader takes its ``p``-th.
    place_begin, place
        Original strategy ``s`` of ``leaders[k]`` is its ``place[place_begin[k] + s]``-th.
    """

    nodes: IntArray
    leaders: IntArray
    begin: IntArray
    choice: IntArray
    place_begin: IntArray
    place: IntArray

    @classmethod
    def of(cls, nodes: IntArray, leader: IntArray, begin: IntArray, strategy: IntArray, start: IntArray) -> Tied:
        """Make it from what all nodes do.

        Parameters
        ----------
        nodes
            Those that follow or are fixed.
        leader
            Per node of the problem its leader, possibly itself.
        begin, strategy
            Per node of the problem its original strategy for every strategy of its leader, from ``begin`` on.
        start
            Where strategies of nodes begin in the original problem.
        """
        place: IntArray = np.zeros(int(start[-1]), dtype=np.int64)
        sizes = np.diff(begin)
        owner = np.repeat(np.arange(len(leader), dtype=np.int64), sizes)
        own = leader[owner] == owner
        position = np.arange(len(strategy), dtype=np.int64) - np.repeat(begin[:-1], sizes)
        place[start[owner[own]] + strategy[own]] = position[own]
        # A fixed node is read before it is written, when its choice is still 0.
        return cls(nodes, leader[nodes], begin[nodes], strategy, start[leader[nodes]], place)

    def lift(self, choices: list[int]) -> None:
        """Write what the nodes choose, from what their leaders do."""
        known: IntArray = np.array(choices, dtype=np.int64)
        places = self.place[self.place_begin + known[self.leaders]]
        known[self.nodes] = self.choice[self.begin + places]
        choices[:] = known.tolist()


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
    follows: tuple[Follow | Tied, ...]
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
            follow.lift(lifted)
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
