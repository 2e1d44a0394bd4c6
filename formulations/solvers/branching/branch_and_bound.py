"""Branch and bound whose every bound is an evaluation in exact integers.

A tree over the strategies of nodes. The bound of a branch is that of its relaxation's duals, evaluated in integers
(:mod:`formulations.solvers.branching.relaxation`); strategies that cannot be part of a better assignment are dropped by
it (fixing by reduced cost), so that children are smaller than halves. Where that drops many at the root, at first or
for a better incumbent, what is left is presolved, and the tree begins again on this core. A branch of few assignments
is enumerated. So nothing that HiGHS says decides a proof: it only suggests duals, assignments and where to branch. The
tree ends with the optimum, or with the proof that nothing is feasible.

The branch of the smallest bound comes next, but a child first goes on below its parent while it has lost little: its
relaxation is solved from a similar one, and assignments are found in the depth. The node whose priced usage is spread
widest is split, with half of the relaxation's weight on either side, the heavier strategies first.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from formulations.encodings.flat import FlatProblem, FloatArray, flatten
from formulations.encodings.linear_model import linear_columns
from formulations.encodings.priced_costs import priced_usage
from formulations.presolve import Presolved, lean_presolve, presolve
from formulations.presolve.workspace.allowed_strategies import cut_forbidden_strategies
from formulations.problem.checker import check
from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.problem.strategy_problem import BoolArray, IntArray, StrategyProblem
from formulations.solvers.branching.parts import Choices, presolved_part
from formulations.solvers.branching.relaxation import Relaxation, Relaxed, spread_within
from formulations.solvers.branching.tunables import WORTH_PRESOLVING
from formulations.solvers.exact import brute_force
from formulations.solvers.exact.tunables import CHUNK
from formulations.solvers.prices.fixing import fix_by_reduced_cost
from formulations.solvers.prices.integer_bound import holds_exact_costs
from formulations.solvers.protocol.exchange import EXCHANGE
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress

_DECIDED = 1e-4
"""Not tunable: a relaxation this close to a decision is one."""


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


class _Tree:
    """The open branches of a reduced problem."""

    def __init__(self, problem: StrategyProblem, space: _Space, search: _Search, contradiction: str = "") -> None:
        self.problem, self.space, self.search, self.contradiction = problem, space, search, contradiction
        self.flat: FlatProblem = flatten(problem)
        self._open: list[tuple[int, int, BoolArray]] = []
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
        below_any_cost = -int(self.flat.penalty)
        branch: tuple[int, BoolArray] | None = below_any_cost, np.ones(len(self.flat.unary), dtype=np.bool_)
        while (branch is not None or self._open) and not self.search.ends():
            self.search.import_incumbent()
            core = self._core()
            if core is not None:
                return core.run()
            if branch is None:
                bound, _, allowed = heapq.heappop(self._open)
                if self._is_beaten(bound):
                    self._open.clear()  # it was the smallest
                    break
                branch = bound, allowed
            branch = self._work(*branch)
            waiting = [own[0] for own in (branch, self._open[0] if self._open else None) if own is not None]
            if waiting and min(waiting) > below_any_cost:
                self.search.raise_bound(min(waiting) + self.space.offset)
        if branch is not None:
            self._push(*branch)
        self.search.message = f"{self.search.worked} branches, {len(self._open)} open"
        return not self._open

    def _work(self, bound: int, allowed: BoolArray) -> tuple[int, BoolArray] | None:
        """Bound a branch, split what is left of it, and return the part to go on with, if any; the other one waits."""
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
        if self._pushed == 0 and relaxed.duals is not None:
            self._root = bound, relaxed.duals
        if self._is_beaten(bound):
            return None
        left = self._without_hopeless(relaxed)
        sizes = np.add.reduceat(left, self.flat.graph.offset[:-1], dtype=np.int64)
        if not sizes.all() or self._enumerate(left):
            return None
        first, second = _split(self.flat, left, sizes, relaxed)
        self._push(bound, second)
        if self._is_promising(bound):
            return bound, first
        self._push(bound, first)
        return None

    def _is_promising(self, bound: int) -> bool:
        """Whether to go on below a branch, before any other: it has lost less than it has left.

        Relaxations are solved soonest from similar ones.
        """
        cutoff = self._cutoff
        if cutoff is None:
            return True
        least = min(bound, self._open[0][0])
        return bound - least <= cutoff - bound

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

    def _push(self, bound: int, allowed: BoolArray) -> None:
        self._pushed += 1
        heapq.heappush(self._open, (bound, self._pushed, allowed))

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


def _split(flat: FlatProblem, allowed: BoolArray, sizes: IntArray, relaxed: Relaxed) -> tuple[BoolArray, BoolArray]:
    """Two branches: half of the weight of a node in the relaxation on either side, the heavier strategies first.

    Memory is what keeps relaxations from being decisions: they mix strategies that use much and little to meet a limit
    exactly. So the node whose usage at the relaxation's prices is mixed widest is split; it raises the bound most when
    it has to decide. Where the relaxation does not tell, all strategies weigh the same, and the largest node is split.
    """
    offset = flat.graph.offset
    values = np.zeros(len(allowed)) if relaxed.values is None else relaxed.values
    weight = np.where(allowed, values, 0.0)
    undecided = (sizes > 1) & (np.maximum.reduceat(weight, offset[:-1]) < 1.0 - _DECIDED)
    if relaxed.values is not None and relaxed.duals is not None and undecided.any():
        spread = spread_within(weight, priced_usage(flat, relaxed.duals[0]), offset[:-1])
        node = int(np.argmax(np.where(undecided, spread, -1.0)))
    else:
        weight, node = np.ones(len(allowed)), int(np.argmax(sizes))
    own = offset[node] + np.flatnonzero(allowed[offset[node] : offset[node + 1]])
    order = own[np.argsort(-weight[own], kind="stable")]
    summed = np.cumsum(weight[order])
    count = min(1 + int(np.searchsorted(summed, 0.5 * summed[-1])), len(order) - 1)
    heavier, lighter = allowed.copy(), allowed.copy()
    heavier[own] = lighter[own] = False
    heavier[order[:count]] = lighter[order[count:]] = True
    return heavier, lighter
