"""One branch of a search: the strategies that it leaves, and its bound from prices."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from formulations.encodings.flat import FlatProblem, FloatArray, message_entries
from formulations.encodings.flat_restriction import Restriction, narrow
from formulations.problem.strategy_problem import BoolArray, IntArray
from formulations.solvers.branching.split_gains import Split
from formulations.solvers.prices.ascent import PriceAscent
from formulations.solvers.prices.integer_bound import IntegerBound, integer_bound


@dataclass(slots=True, eq=False)
class Leaf:
    """What is remembered of a branch while others are worked on.

    Parameters
    ----------
    allowed
        Flags of the strategies left, laid out as ``unary`` of the root.
    bound
        No assignment of the branch costs less.
    prices
        The prices that gave the bound.
    messages
        The messages that gave it, for the restricted problem; single precision is enough to start from.
    raised
        Whether price steps have been made in this branch (else only sweeps).
    split
        The split that it came from, where that was one of usage.
    """

    allowed: BoolArray
    bound: int
    prices: FloatArray
    messages: np.typing.NDArray[np.float32]
    raised: bool = False
    split: Split | None = None


class OpenLeaf:
    """A branch at work: its restricted problem, prices and messages.

    Attributes
    ----------
    bound
        The best exact bound so far.
    proof
        The last exact evaluation, or None where there was none.
    closed
        Whether no assignment of the branch exists.
    split
        The split that it came from, where that was one of usage.
    """

    def __init__(
        self,
        root: FlatProblem,
        restriction: Restriction,
        bound: int,
        start: tuple[FloatArray, FloatArray],
        split: Split | None = None,
    ) -> None:
        self.root = root
        self.restriction = restriction
        self.bound = bound
        self.proof: IntegerBound | None = None
        self.closed = False
        self.split = split
        self._start = start

    @cached_property
    def ascent(self) -> PriceAscent:
        """Prices and messages at work; arrays for them are not made where a branch is only remembered."""
        ascent = PriceAscent(self.flat)
        ascent.start_from(*self._start)
        return ascent

    @property
    def flat(self) -> FlatProblem:
        """The restricted problem."""
        return self.restriction.flat

    def sweep(self, pairs: int) -> None:
        """Adapt the messages to the strategies left, and prove the bound."""
        self.ascent.sweeps(pairs)
        self.prove()

    def climb(self, steps: int, deadline: float, enough: float = math.inf) -> None:
        """Make price steps, until ``deadline`` (of :func:`time.monotonic`) at most, and prove the bound.

        Steps end at a bound above ``enough``: where nothing fits, they would go on to prices that no integers hold.

        The first prices and messages count as well: without them a branch would go on from worse ones than its
        parent's. Steps cool as the second half of a longer ascent does; cold ones alone hardly move.
        """
        self.ascent.sweeps(1)
        for k in range(steps):
            self.ascent.step((steps + k) / (2 * steps - 1), same_rows=k > 0)
            if self.ascent.best_bound > enough or time.monotonic() > deadline:
                break
        self.prove()

    def prove(self) -> None:
        """Evaluate the best prices and messages in integers."""
        self.proof = integer_bound(self.flat, self.ascent.best_prices, self.ascent.best_messages)
        if self.proof is not None:
            self.closed = self.closed or self.proof.contradiction
            self.bound = max(self.bound, self.proof.bound)

    def kept(self) -> BoolArray:
        """Return flags of the strategies left, laid out as the root's ``unary``."""
        flags = np.zeros(len(self.root.unary), dtype=np.bool_)
        flags[self.restriction.entries[self.restriction.left]] = True
        return flags

    def root_messages(self) -> FloatArray:
        """Return the best messages in the layout of the root, zero elsewhere."""
        messages = np.zeros(message_entries(self.root.graph))
        messages[self.restriction.messages] = self.ascent.best_messages
        return messages

    def root_choices(self, choices: IntArray) -> IntArray:
        """Return an assignment of the branch as one of the root."""
        return self.restriction.original(choices, self.root.graph.offset)

    def narrowed(self, allowed: BoolArray) -> OpenLeaf | None:
        """Return the branch with fewer strategies (flags laid out as the root's ``unary``), None if none is left."""
        restriction = narrow(self.root, allowed)
        if restriction is None:
            return None
        start = self.ascent.best_prices, self.root_messages()[restriction.messages]
        return OpenLeaf(self.root, restriction, self.bound, start, self.split)

    def fix_by_reduced_cost(self, objective: int) -> OpenLeaf | None:
        """Return the branch without what no assignment cheaper than ``objective`` has, None if none is left."""
        if self.proof is None:
            return self
        hopeless = (self.proof.excess >= self.proof.hopeless_from(objective)) & self.restriction.left
        if not hopeless.any():
            return self
        allowed = self.kept()
        allowed[self.restriction.entries[hopeless]] = False
        return self.narrowed(allowed)

    def stored(self, raised: bool) -> Leaf:
        """Return what to remember."""
        prices, messages = self._start
        if "ascent" in self.__dict__:
            prices, messages = self.ascent.best_prices, self.ascent.best_messages
        return Leaf(self.kept(), self.bound, prices, messages.astype(np.float32), raised, self.split)


def reopened(root: FlatProblem, leaf: Leaf) -> OpenLeaf:
    """Return a remembered branch, ready for work."""
    restriction = narrow(root, leaf.allowed)
    assert restriction is not None, "a remembered branch has strategies left"
    start = leaf.prices, leaf.messages.astype(np.float64)
    return OpenLeaf(root, restriction, leaf.bound, start, leaf.split)
