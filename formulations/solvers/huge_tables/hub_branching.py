"""Branch and bound over the strategies of hubs, with memory prices over messages as the bound.

Where a few nodes touch hundreds of others, message passing proves little: every cycle through a hub is cut. With the
hub decided these cycles are gone. So the strategies of the hub that promises most are split into groups, every group is
a branch with a bound of its own, warm started from its parent's prices and messages, and the smallest bound of all open
branches holds for the problem. Strategies that cannot be part of a better assignment are dropped on the way
(:mod:`formulations.solvers.prices.integer_bound`). Every branch is decoded by decimation, then repaired and filled.

The root is :class:`formulations.solvers.prices.lagrangian.PriceSearch`, or where tables are very large
:class:`formulations.solvers.prices.bounding.PriceBounding`; then every trial costs about a second, so that one hub is
tried, its branches are built one after another, and hardly any is decoded. Branching on the node that raises the bounds
most after a few trial sweeps is strong branching (Applegate, Bixby, Chvatal and Cook 1995).
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from formulations.encodings.flat import FlatProblem
from formulations.encodings.flat_restriction import restrict
from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.problem.strategy_problem import IntArray, StrategyProblem
from formulations.solvers.branching.open_leaf import Leaf, OpenLeaf, reopened
from formulations.solvers.huge_tables.decimation import decimate
from formulations.solvers.huge_tables.tunables import (
    BRANCH_STEPS,
    BRANCHES,
    DECODING_SHARE,
    HUB_FACTORS_SHARE,
    ROOT_SHARE,
    TRIED_HUBS,
    WIDE_DECODING_SHARE,
    WIDE_TRIED_HUBS,
)
from formulations.solvers.local_search.tree_moves import HUB_DEGREE
from formulations.solvers.prices.bounding import PriceBounding
from formulations.solvers.prices.flatten_or_finish import flatten_or_finish
from formulations.solvers.prices.integer_bound import holds_exact_costs
from formulations.solvers.prices.lagrangian import PriceSearch
from formulations.solvers.prices.tunables import LAST_SHARE, PAIRS
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress


def solve(problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent) -> Claim:
    """Solve by branching on hubs; where there are none, the claim is empty and its message has the reason.

    With ``iteration_limit`` the root makes that many price steps, then that many branches are worked on; that is
    deterministic as long as the time limit does not cut it short.
    """
    started = time.monotonic()
    flat = flatten_or_finish(problem, incumbent)
    if isinstance(flat, Claim):
        return flat
    if not len(hubs(flat)):
        return Claim(None, None, message=f"no hubs: nodes of degree {HUB_DEGREE} touch hardly any factor")
    first = replace(options, time_limit=ROOT_SHARE * options.time_limit)
    root = PriceSearch(problem, flat, first, report, incumbent, started)
    claim = root.run()
    if claim.proved_infeasible or claim.bound is None:
        return claim
    return branch(flat, root, claim, options, report, started)


def branch(
    flat: FlatProblem,
    root: PriceSearch | PriceBounding,
    claim: Claim,
    options: SolveOptions,
    report: ReportProgress,
    started: float,
) -> Claim:
    """Branch on hubs from where a search at prices ended, until ``options.time_limit`` seconds after ``started``.

    ``claim`` is what that search found: a bound, and perhaps an assignment.
    """
    if not holds_exact_costs(flat):
        return replace(claim, message="too large to branch on: sums of costs or usages leave the range of doubles")
    root.search.extend(started + options.time_limit)
    return _HubSearch(flat, root, claim, options, report, started).run()


def hubs(flat: FlatProblem) -> IntArray:
    """Return the nodes of high degree that have a choice; none where all of them together touch hardly any factor."""
    degree = np.diff(flat.graph.incident_start)
    least = min(HUB_DEGREE, max(2, len(degree) // 8))
    found: IntArray = np.flatnonzero((degree >= least) & (flat.graph.sizes > 1)).astype(np.int64)
    return found if degree[found].sum() >= HUB_FACTORS_SHARE * len(flat.graph.arity) else found[:0]


class _HubSearch:
    """The open branches, the incumbent, and the clock."""

    def __init__(
        self,
        flat: FlatProblem,
        root: PriceSearch | PriceBounding,
        claim: Claim,
        options: SolveOptions,
        report: ReportProgress,
        started: float,
    ) -> None:
        assert claim.bound is not None
        self.flat = flat
        self.search = root.search
        self.bound = claim.bound
        self.root_iterations = claim.iterations
        self.worked = 0
        self._root = root
        wide = isinstance(root, PriceBounding)
        self._tried_hubs = WIDE_TRIED_HUBS if wide else TRIED_HUBS
        self._decoding_share = WIDE_DECODING_SHARE if wide else DECODING_SHARE
        self._options = options
        self._report = report
        self._started = started
        self._deadline = started + LAST_SHARE * options.time_limit
        self._decoding_seconds = 0.0
        self._branching_since = time.monotonic()
        self._random = np.random.default_rng(options.seed)
        self._waiting: list[tuple[int, int, Leaf]] = []
        self._pushed = 0
        self._stuck = False

    def run(self) -> Claim:
        """Work on the branch of the smallest bound until none is open or the time is up."""
        allowed = np.ones(len(self.flat.unary), dtype=np.bool_)
        restriction = restrict(self.flat, allowed)
        if restriction is not None:
            ascent = self._root.ascent
            start = ascent.best_prices, ascent.best_messages[restriction.messages]
            top = OpenLeaf(self.flat, restriction, self.bound, start)
            top.sweep(1)
            self._keep(top, raised=True)
        while self._waiting and not self._finished():
            self.search.hear_others()
            leaf = heapq.heappop(self._waiting)[2]
            if not self._beaten(leaf.bound):
                self.worked += 1
                self._work_on(reopened(self.flat, leaf), leaf.raised)
            self._tell()
        return self._claim()

    def _work_on(self, leaf: OpenLeaf, raised: bool) -> None:
        """Raise the bound of a branch and decode it; or, if that was done before, split it."""
        if raised:
            leaf.prove()
            if leaf.proof is None:
                self._stuck = True
                self._push(leaf, raised)
                return
            for part in self._split(leaf):
                self._keep(part, raised=False)
            return
        leaf.climb(BRANCH_STEPS, self._deadline)
        if leaf.closed or self._beaten(leaf.bound):
            return
        self._decode(leaf)
        self._keep(leaf, raised=True)

    def _keep(self, leaf: OpenLeaf, raised: bool) -> None:
        """Remember a branch unless it is empty or holds nothing better than the incumbent."""
        if leaf.closed or self._beaten(leaf.bound):
            return
        objective = self.search.objective
        kept = leaf if objective is None else leaf.fix_by_reduced_cost(objective)
        if kept is None:
            return
        if kept.flat.graph.sizes.max() == 1:
            # One assignment is left: whatever it is worth, there is nothing to branch on.
            self.search.offer(kept.root_choices(np.zeros(len(kept.flat.graph.sizes), dtype=np.int64)))
            return
        self._push(kept, raised)

    def _push(self, leaf: OpenLeaf, raised: bool) -> None:
        self._pushed += 1
        heapq.heappush(self._waiting, (leaf.bound, self._pushed, leaf.stored(raised)))

    def _split(self, leaf: OpenLeaf) -> Iterable[OpenLeaf]:
        """Try the most promising nodes; return the parts of the one whose parts have the highest bounds."""
        best: list[OpenLeaf] = []
        best_score = -np.inf
        candidates = self._candidates(leaf)
        if len(candidates) == 1:
            return self._parts(leaf, candidates[0])
        for node in candidates:
            parts = list(self._parts(leaf, node))
            gains = [float(part.bound - leaf.bound) for part in parts if not part.closed]
            score = min(gains, default=np.inf) + 1e-3 * sum(gains)
            if score > best_score:
                best, best_score = parts, score
            if not gains or self._out_of_time():
                break
        return best

    def _candidates(self, leaf: OpenLeaf) -> list[int]:
        """The undecided nodes of highest degree times spread of what their strategies cost beyond the bound."""
        graph = leaf.flat.graph
        assert leaf.proof is not None
        starts = graph.offset[:-1]
        excess = np.minimum(leaf.proof.excess.astype(np.float64), leaf.proof.scale * 0.01 * self.flat.penalty)
        spread = np.add.reduceat(excess, starts) / graph.sizes
        degree = np.diff(graph.incident_start)
        score = np.where(graph.sizes > 1, (degree + 0.01) * (spread + 1e-3 * leaf.proof.scale), -1.0)
        order = np.argsort(-score, kind="stable")[: self._tried_hubs]
        return [int(i) for i in order if score[i] > 0]

    def _parts(self, leaf: OpenLeaf, node: int) -> Iterator[OpenLeaf]:
        """Split a node's strategies: the cheapest few alone, all others together; drop empty parts."""
        graph = leaf.flat.graph
        assert leaf.proof is not None
        entries = np.arange(graph.offset[node], graph.offset[node + 1])
        entries = entries[np.argsort(leaf.proof.excess[entries], kind="stable")]
        groups = [entries[g : g + 1] for g in range(BRANCHES - 1)] + [entries[BRANCHES - 1 :]]
        everything = leaf.kept()
        for group in groups:
            if not len(group):
                continue
            allowed = everything.copy()
            allowed[leaf.restriction.entries[entries]] = False
            allowed[leaf.restriction.entries[group]] = True
            part = leaf.narrowed(allowed)
            if part is not None:
                # Without sweeps a part still has its parent's bound.
                if not self._out_of_time():
                    part.sweep(PAIRS)
                yield part

    def _decode(self, leaf: OpenLeaf) -> None:
        """Look for a better incumbent in a branch."""
        begun = time.monotonic()
        spent = self._decoding_seconds
        if self._options.iteration_limit is None and spent > self._decoding_share * (begun - self._branching_since):
            return
        prices = leaf.ascent.best_prices
        for by_decimation in (False, True):
            if self._out_of_time():
                break
            decoded = decimate(leaf.ascent, prices, self._random) if by_decimation else leaf.ascent.choices
            candidate = leaf.root_choices(decoded)
            self.search.set_prices(prices)
            self.search.settle(candidate)
            self.search.grow_trees(candidate, 2 * len(candidate), 4000)
            self.search.finish(candidate, prices)
        self._decoding_seconds += time.monotonic() - begun

    def _beaten(self, bound: int) -> bool:
        return self.search.objective is not None and bound >= self.search.objective

    def _tell(self) -> None:
        """Raise the bound to the smallest of all open branches, or to the incumbent, and report it."""
        smallest = self._waiting[0][0] if self._waiting else self.search.objective
        objective = self.search.objective
        if smallest is not None:
            self.bound = max(self.bound, smallest if objective is None else min(smallest, objective))
            # The root reports what the incumbent search finds, with the bound that it knows.
            self._root.proven.raise_to(self.bound)
        self._report(Progress(time.monotonic() - self._started, objective, self.bound, "hub_branching"))

    def _finished(self) -> bool:
        options, objective = self._options, self.search.objective
        if self._stuck:
            return True
        known = self._root.proven.known
        if objective is not None and known is not None and options.accepts(objective, known):
            return True
        if options.iteration_limit is not None and self.worked >= options.iteration_limit:
            return True
        return self._out_of_time()

    def _out_of_time(self) -> bool:
        return time.monotonic() > self._deadline

    def _claim(self) -> Claim:
        self._tell()
        iterations = self.root_iterations + self.worked
        message = f"{self.worked} branches, {len(self._waiting)} open"
        if self.search.best is None:
            if not self._waiting:
                return Claim(None, None, proved_infeasible=True, message=message, iterations=iterations)
            return Claim(None, self.bound, message=message, iterations=iterations)
        return Claim(self.flat.original_choices(self.search.best), self.bound, message=message, iterations=iterations)
