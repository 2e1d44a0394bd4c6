"""Branch and bound whose every bound is an evaluation in exact integers.

A tree over the strategies of nodes. The bound of a branch is that of its relaxation's duals, evaluated in integers
(:mod:`formulations.solvers.branching.relaxation`); strategies that cannot be part of a better assignment are dropped by
it (fixing by reduced cost), so that children are smaller than halves. Where that drops many at the root, at first or
for a better incumbent, what is left is presolved, and the tree begins again on this core. A branch of few assignments
is enumerated. So nothing that HiGHS says decides a proof: it only suggests duals, assignments and where to branch. The
tree ends with the optimum, or with the proof that nothing is feasible.

The branch of the smallest bound comes next, but a child first goes on below its parent while it has lost little: its
relaxation is solved from a similar one, and assignments are found in the depth. A node whose priced usage is spread
widely, and whose splits have gained so far, is split into strategies that use less and more than the mean. Both parts
are bounded at once, and other nodes are tried while they promise more: reliability branching (Achterberg, Koch and
Martin 2005).
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from formulations.encodings.flat import FlatProblem, FloatArray, flatten
from formulations.encodings.linear_model import linear_columns
from formulations.encodings.priced_costs import priced_usage
from formulations.presolve import Presolved, lean_presolve, presolve
from formulations.presolve.workspace.allowed_strategies import cut_forbidden_strategies
from formulations.problem.checker import check
from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.problem.strategy_problem import BoolArray, IntArray, StrategyProblem
from formulations.solvers.branching.halves import Mixture
from formulations.solvers.branching.parts import Choices, presolved_part
from formulations.solvers.branching.relaxation import Relaxation, Relaxed
from formulations.solvers.branching.split_gains import Candidate, Split, SplitGains
from formulations.solvers.branching.tunables import WORTH_PRESOLVING
from formulations.solvers.exact import brute_force
from formulations.solvers.exact.tunables import CHUNK
from formulations.solvers.prices.fixing import fix_by_reduced_cost
from formulations.solvers.prices.integer_bound import holds_exact_costs
from formulations.solvers.protocol.exchange import EXCHANGE
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress


def solve(
    problem: StrategyProblem,
    options: SolveOptions,
    report: ReportProgress,
    incumbent: ReportIncumbent,
    most_enumerated: int = CHUNK,
    below: int | None = None,
) -> Claim:
    """Solve exactly, or to ``options.relative_gap`` where that is positive.

    Parameters
    ----------
    problem, options, report, incumbent
        As every solver takes them; ``options.initial_choices`` is the first incumbent, and ``iteration_limit`` counts
        branches.
    most_enumerated
        Assignments of a branch up to which it is enumerated.
    below
        Only assignments that cost less are looked for, and where there is none this is the bound.

    Returns
    -------
    Claim
        Without a bound where sums of costs or usages leave the range of doubles and there is too much to enumerate; its
        message says so then.
    """
    return _Search(problem, options, report, incumbent, most_enumerated, below).run()


@dataclass(frozen=True, slots=True)
class _Space:
    """How a smaller problem lies in the problem: its assignments, lifted, cost ``offset`` more."""

    lift: Callable[[Choices], Choices]
    offset: int

    def within(self, reduced: Presolved, cut: Callable[[Choices], Choices] = lambda choices: choices) -> _Space:
        """The space of a problem that was reduced, after strategies were cut out."""
        return _Space(lambda choices: self.lift(cut(reduced.lift(choices))), self.offset + reduced.offset)


class _Search:
    """The incumbent and the bound of the problem, and the clock."""

    def __init__(
        self,
        problem: StrategyProblem,
        options: SolveOptions,
        report: ReportProgress,
        incumbent: ReportIncumbent,
        most_enumerated: int,
        below: int | None,
    ) -> None:
        self.problem, self.options, self.most_enumerated = problem, options, most_enumerated
        self.below = below
        self.started = time.monotonic()
        self.deadline = self.started + options.time_limit
        self.best: tuple[int, Choices] | None = None
        self.bound: int | None = None
        self.worked = 0
        self.message = ""
        self._report, self._incumbent = report, incumbent

    def run(self) -> Claim:
        """Reduce the problem and search it."""
        if self.options.initial_choices is not None:
            self.offer(self.options.initial_choices)
        whole = _Space(lambda choices: choices, 0)
        reduced = lean_presolve(self.problem, self.deadline)
        is_complete = bool(reduced.contradiction)
        if not is_complete:
            is_complete = _Tree(reduced.problem, whole.within(reduced), self).run()
        if is_complete and self.cutoff is None:
            message = reduced.contradiction or self.message
            return Claim(None, None, True, message, self.worked, certified=True)
        if is_complete and self.cutoff is not None:
            self.raise_bound(self.cutoff)
        choices = None if self.best is None else self.best[1]
        return Claim(choices, self.bound, message=self.message, iterations=self.worked)

    def offer(self, choices: Choices) -> None:
        """Keep an assignment of the problem if it is feasible, in exact integers, and better."""
        report = check(self.problem, choices)
        if report.ok and report.objective is not None and (self.best is None or report.objective < self.best[0]):
            self.best = report.objective, choices
            self._incumbent(choices)

    @property
    def cutoff(self) -> int | None:
        """Cost from which on an assignment is of no use."""
        if self.best is None or self.below is None:
            return self.below if self.best is None else self.best[0]
        return min(self.best[0], self.below)

    def raise_bound(self, bound: int) -> None:
        """Keep and report a bound on the cost of the problem if it is better; the cutoff is the largest."""
        cutoff = self.cutoff
        valid = bound if cutoff is None else min(bound, cutoff)
        if self.bound is None or valid > self.bound:
            self.bound = valid
            objective = None if self.best is None else self.best[0]
            self._report(Progress(time.monotonic() - self.started, objective, valid, "branch_and_bound"))

    def import_incumbent(self) -> None:
        """Take over what another solver found meanwhile, if it is better."""
        choices = EXCHANGE.take(self.problem)
        if choices is not None:
            self.offer(choices)

    def ends(self) -> bool:
        """Whether time or branches are over, or the incumbent is good enough, also by what others have proved."""
        limit = self.options.iteration_limit
        if time.monotonic() > self.deadline or (limit is not None and self.worked >= limit):
            return True
        known = EXCHANGE.bound(self.problem, self.bound)
        return self.best is not None and known is not None and self.options.accepts(self.best[0], known)


class _Sparse(NamedTuple):
    """An array of which most is zero."""

    size: int
    places: IntArray
    values: FloatArray

    @classmethod
    def of(cls, dense: FloatArray) -> _Sparse:
        """Return what is not zero."""
        places = np.flatnonzero(dense)
        return cls(len(dense), places, dense[places])

    def dense(self) -> FloatArray:
        """Return the array."""
        found = np.zeros(self.size)
        found[self.places] = self.values
        return found


class _Branch(NamedTuple):
    """A part of a problem that has been bounded, with the weights of its relaxation and its prices where it has any."""

    bound: int
    allowed: BoolArray
    weight: _Sparse | None = None
    prices: _Sparse | None = None

    def mixture(self, flat: FlatProblem) -> Mixture:
        """How its relaxation mixes strategies; all weigh the same without one, or where it is a decision."""
        offset = flat.graph.offset
        if self.weight is not None and self.prices is not None:
            priced = priced_usage(flat, self.prices.dense())
            found = Mixture(offset, self.allowed, self.weight.dense(), priced)
            if found.undecided().any():
                return found
        return Mixture(offset, self.allowed, np.ones(len(self.allowed)), np.zeros(len(self.allowed)))


class _Tree:
    """The open branches of a reduced problem."""

    def __init__(self, problem: StrategyProblem, space: _Space, search: _Search, contradiction: str = "") -> None:
        self.problem, self.space, self.search, self.contradiction = problem, space, search, contradiction
        self.flat: FlatProblem = flatten(problem)
        self._gains = SplitGains(len(problem.nodes))
        self._open: list[tuple[int, int, _Branch]] = []
        self._pushed = 0
        self._root: tuple[int, tuple[FloatArray, FloatArray]] | None = None
        """Bound of the root and the duals behind it."""
        self._tried: int | None = None
        """Cost of the incumbent for which a core was tried."""

    def run(self) -> bool:
        """Work on the branch of the smallest bound; return whether nothing is left that may be better."""
        if self.contradiction or self.flat.contradiction:
            return True
        if not self.problem.nodes:
            self._offer(())
            return True
        if not holds_exact_costs(self.flat) and not self._enumerate(np.ones(len(self.flat.unary), dtype=np.bool_)):
            self.search.message = "too large for exact branch and bound: sums leave the range of doubles"
            return False
        branch = self._bounded(-int(self.flat.penalty), np.ones(len(self.flat.unary), dtype=np.bool_))
        while branch is not None or self._open:
            self._publish(branch)
            if self.search.ends():
                break
            self.search.import_incumbent()
            core = self._core()
            if core is not None:
                return core.run()
            if branch is None:
                branch = heapq.heappop(self._open)[-1]
                if self._is_beaten(branch.bound):
                    self._open.clear()  # it was the smallest
                    return True
            branch = self._work(branch)
        self.search.message = f"{self.search.worked} branches, {len(self._open) + (branch is not None)} open"
        return branch is None and not self._open

    def _publish(self, branch: _Branch | None) -> None:
        """Raise the bound to the smallest of the branch at work and all open ones."""
        waiting = [self._open[0][0]] if self._open else []
        smallest = min(waiting if branch is None else [*waiting, branch.bound])
        if smallest > -int(self.flat.penalty):
            self.search.raise_bound(smallest + self.space.offset)

    def _bounded(self, bound: int, allowed: BoolArray) -> _Branch | None:
        """Return a branch with its own bound, or that of its parent; None where nothing in it may be better."""
        self.search.worked += 1
        if self._enumerate(allowed):
            return None
        relaxed = self.relaxation.solve(allowed, self.search.deadline)
        if relaxed.closed:
            return None
        if relaxed.values is not None:
            self._offer(self.flat.original_choices(_rounded(self.flat, relaxed.allowed, relaxed.values)))
        if relaxed.proof is not None:
            bound = max(bound, relaxed.proof.bound)
        if self._root is None and relaxed.duals is not None:
            self._root = bound, relaxed.duals
        if self._is_beaten(bound):
            return None
        left = self._without_hopeless(relaxed)
        sizes = np.add.reduceat(left, self.flat.graph.offset[:-1], dtype=np.int64)
        if not sizes.all() or self._enumerate(left):
            return None
        if relaxed.values is None or relaxed.duals is None:
            return _Branch(bound, left)
        return _Branch(bound, left, _Sparse.of(relaxed.values), _Sparse.of(relaxed.duals[0]))

    def _work(self, branch: _Branch) -> _Branch | None:
        """Split a branch, and return the part to go on with, if any; the other one waits.

        Nodes are tried while they promise more than the best so far has gained. If nothing in a part may be better, the
        other part is the whole branch.
        """
        mixture = branch.mixture(self.flat)
        best: list[_Branch] = []
        most = -1.0
        for candidate in self._candidates(mixture):
            if candidate.promised <= most or (best and self.search.ends()):
                break
            parts = [self._bounded(branch.bound, half) for half in mixture.halves(candidate.node)]
            gained = self._recorded(branch, candidate, parts)
            if gained > most or None in parts:
                best, most = [part for part in parts if part is not None], gained
            if None in parts:
                break
        best.sort(key=lambda part: -part.bound)
        onwards = best.pop() if best and self._is_promising(best[-1].bound) else None
        for part in best:
            self._push(part)
        return onwards

    def _candidates(self, mixture: Mixture) -> Iterable[Candidate]:
        """Nodes to split: those whose usage spreads, else the undecided one of the most strategies."""
        spread = mixture.spread()
        if spread.any():
            return self._gains.candidates(spread)
        sizes = np.add.reduceat(mixture.allowed, mixture.offset[:-1], dtype=np.int64)
        undecided = mixture.undecided()
        return [Candidate(int(np.argmax(np.where(undecided, sizes, 0) if undecided.any() else sizes)), 0.0, 0.0)]

    def _recorded(self, branch: _Branch, candidate: Candidate, parts: list[_Branch | None]) -> float:
        """Learn what the parts of a branch have gained; return the lesser gain."""
        cutoff = self._cutoff
        highest = max((part.bound for part in parts if part is not None), default=branch.bound)
        beaten = highest if cutoff is None else cutoff
        bounds = [beaten if part is None else part.bound for part in parts]
        for side, bound in enumerate(bounds):
            if candidate.spread > 0.0:
                self._gains.record(Split(candidate.node, candidate.spread, branch.bound, side), bound)
        return float(min(bounds) - branch.bound)

    def _is_promising(self, bound: int) -> bool:
        """Whether to go on below a branch, before any other: it has lost less than it has left.

        Relaxations are solved soonest from similar ones.
        """
        cutoff = self._cutoff
        if cutoff is None or not self._open:
            return True
        return bound - self._open[0][0] <= cutoff - bound

    @cached_property
    def relaxation(self) -> Relaxation:
        """The relaxation, built where enumeration does not suffice."""
        return Relaxation(self.problem, self.flat, self.search.options.seed)

    def _without_hopeless(self, relaxed: Relaxed) -> BoolArray:
        """What may be part of a better assignment than the incumbent."""
        cutoff = self._cutoff
        if cutoff is None or relaxed.proof is None:
            return relaxed.allowed
        left = relaxed.allowed.copy()
        left[np.flatnonzero(left)[relaxed.proof.excess >= relaxed.proof.hopeless_from(cutoff)]] = False
        return left

    def _core(self) -> _Tree | None:
        """The tree of what may be better than the incumbent, combinations included; None where that is most of it.

        Tried at the root, and again where the incumbent is much better than it was then.
        """
        cutoff = self._cutoff
        if cutoff is None or self._root is None:
            return None
        bound, duals = self._root
        if self._tried is not None and cutoff - bound > WORTH_PRESOLVING * (self._tried - bound):
            return None
        self._tried = cutoff
        hopeful = fix_by_reduced_cost(self.problem, self.flat, *duals, cutoff - 1)
        cut, lift = cut_forbidden_strategies(hopeful)
        reduced = presolve(cut, deadline=self.search.deadline)
        if not reduced.contradiction and linear_columns(reduced.problem) > WORTH_PRESOLVING * linear_columns(
            self.problem
        ):
            return None
        return _Tree(reduced.problem, self.space.within(reduced, lift), self.search, reduced.contradiction)

    def _enumerate(self, allowed: BoolArray) -> bool:
        """Look at all assignments of a branch if they are few; return whether they are."""
        sizes = np.add.reduceat(allowed, self.flat.graph.offset[:-1], dtype=np.int64)
        if math.prod(sizes.tolist()) > self.search.most_enumerated:
            return False
        reduced, lift = presolved_part(self.problem, self.flat, allowed, self.search.deadline)
        if reduced.contradiction:
            return True
        choices: Choices | None = ()
        if reduced.problem.nodes:
            choices = brute_force.solve(reduced.problem, SolveOptions(), lambda _: None, lambda _: None).choices
        if choices is not None:
            self._offer(lift(reduced.lift(choices)))
        return True

    @property
    def _cutoff(self) -> int | None:
        """Cost from which on an assignment of this problem is of no use."""
        cutoff = self.search.cutoff
        return None if cutoff is None else cutoff - self.space.offset

    def _push(self, branch: _Branch) -> None:
        self._pushed += 1
        heapq.heappush(self._open, (branch.bound, self._pushed, branch))

    def _is_beaten(self, bound: int) -> bool:
        cutoff = self._cutoff
        return cutoff is not None and bound >= cutoff

    def _offer(self, choices: Choices) -> None:
        self.search.offer(self.space.lift(choices))


def _rounded(flat: FlatProblem, allowed: BoolArray, values: FloatArray) -> IntArray:
    """The strategy of the largest value at every node, among those that are allowed."""
    weight = np.where(allowed, values, -1.0)
    offset = flat.graph.offset
    largest = np.repeat(np.maximum.reduceat(weight, offset[:-1]), flat.graph.sizes)
    places = np.flatnonzero(weight == largest)
    first = places[np.searchsorted(places, offset[:-1])]
    return np.asarray(first - offset[:-1], dtype=np.int64)
