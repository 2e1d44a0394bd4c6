"""Branch and bound over the strategies of single nodes, with memory prices over messages as the bound.

Two kinds of nodes keep such a bound low. Memory is one row for all nodes: at its price, strategies that use much and
little cost nearly the same, and the bound mixes them to meet the limit exactly. So a node whose usage is mixed widely,
and whose splits have raised bounds so far (:mod:`formulations.solvers.branching.split_gains`), is split into
strategies that use less and more than the mean, after a few such nodes have been tried. And where a few nodes touch
hundreds of others, message passing proves little, since every cycle through such a hub is cut; where tables are very
large, or nothing has a price, the strategies of the hub that promises most are split into groups.

Every part is a branch with a bound of its own, warm started from its parent's prices and messages, and the smallest
bound of all open branches holds for the problem. Strategies that cannot be part of a better assignment are dropped on
the way (:mod:`formulations.solvers.prices.integer_bound`). For a part of the time branches are decoded, and what that
gives is repaired and filled; and what is small in them is solved exactly
(:mod:`formulations.solvers.huge_tables.small_branches`).

The root is :class:`formulations.solvers.prices.lagrangian.PriceSearch`, or where tables are very large
:class:`formulations.solvers.prices.bounding.PriceBounding`; then every trial costs about a second, so that one hub is
tried, and its branches are built one after another. Branching on the node that raises the bounds most after a few trial
sweeps is strong branching (Applegate, Bixby, Chvatal and Cook 1995).
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace

import numpy as np

from formulations.encodings.flat import FlatProblem, FloatArray
from formulations.encodings.flat_restriction import narrow
from formulations.encodings.priced_costs import expected_usage
from formulations.problem.solution import Claim, Progress, SolveOptions
from formulations.problem.strategy_problem import IntArray, StrategyProblem
from formulations.solvers.branching.halves import Mixture
from formulations.solvers.branching.open_leaf import Leaf, OpenLeaf, reopened
from formulations.solvers.branching.split_gains import Split, SplitGains
from formulations.solvers.huge_tables.small_branches import settle
from formulations.solvers.huge_tables.tunables import (
    BRANCH_STEPS,
    BRANCHES,
    DECODING_SHARE,
    HUB_FACTORS_SHARE,
    ROOT_SHARE,
    SETTLED_SECONDS,
    SETTLING_SHARE,
    TRIED_HUBS,
)
from formulations.solvers.local_search.tree_moves import HUB_DEGREE
from formulations.solvers.prices.bounding import PriceBounding
from formulations.solvers.prices.decimation import decimate
from formulations.solvers.prices.flatten_or_finish import flatten_or_finish
from formulations.solvers.prices.integer_bound import holds_exact_costs
from formulations.solvers.prices.lagrangian import PriceSearch
from formulations.solvers.prices.tunables import LAST_SHARE, PAIRS
from formulations.solvers.protocol.solver import ReportIncumbent, ReportProgress

_COLD = 20.0
"""Not tunable: a strategy that costs one part in so many of the gap is less likely by e. With 10 or 30 some trees prove
more, others less."""

_NEVER = 50.0
"""Not tunable: exponents from which on nothing is likely."""


def solve(problem: StrategyProblem, options: SolveOptions, report: ReportProgress, incumbent: ReportIncumbent) -> Claim:
    """Solve by branching; where nothing is limited and there are no hubs, the claim is empty and says so.

    With ``iteration_limit`` the root makes that many price steps, then that many branches are worked on; that is
    deterministic as long as the time limit does not cut it short.
    """
    started = time.monotonic()
    flat = flatten_or_finish(problem, incumbent)
    if isinstance(flat, Claim):
        return flat
    if not len(hubs(flat)) and not len(flat.usage.limit):
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
    """Branch from where a search at prices ended, until ``options.time_limit`` seconds after ``started``.

    ``claim`` is what that search found: a bound, and perhaps an assignment.
    """
    if not holds_exact_costs(flat):
        return replace(claim, message="too large to branch on: sums of costs or usages leave the range of doubles")
    return Branching(flat, root, claim, options, report, started).run()


def hubs(flat: FlatProblem) -> IntArray:
    """Return the nodes of high degree that have a choice; none where all of them together touch hardly any factor."""
    degree = np.diff(flat.graph.incident_start)
    least = min(HUB_DEGREE, max(2, len(degree) // 8))
    found: IntArray = np.flatnonzero((degree >= least) & (flat.graph.sizes > 1)).astype(np.int64)
    return found if degree[found].sum() >= HUB_FACTORS_SHARE * len(flat.graph.arity) else found[:0]


class Branching:
    """The open branches, the incumbent, and the clock; arguments as for :func:`branch`.

    Branches are decoded for ``decoding_share`` of the time at most.
    """

    def __init__(
        self,
        flat: FlatProblem,
        root: PriceSearch | PriceBounding,
        claim: Claim,
        options: SolveOptions,
        report: ReportProgress,
        started: float,
        decoding_share: float = DECODING_SHARE,
    ) -> None:
        assert claim.bound is not None
        self.flat = flat
        self.search = root.search
        self.search.extend(started + options.time_limit)
        self.bound = claim.bound
        self.root_iterations = claim.iterations
        self.worked = 0
        self._root = root
        self._wide = isinstance(root, PriceBounding)
        self._tried_hubs = 1 if self._wide else TRIED_HUBS
        self._options = options
        self._report = report
        self._started = started
        self._deadline = started
        self._decoding_share = decoding_share
        self._decoding_seconds = 0.0
        self._settling_seconds = 0.0
        self._branching_since = time.monotonic()
        self._random = np.random.default_rng(options.seed)
        self._waiting: list[tuple[int, int, Leaf]] = []
        self._pushed = 0
        self._stuck = False
        self._gains = SplitGains(len(flat.graph.sizes))

    def run(self, share: float = 1.0) -> Claim:
        """Work on the branch of the smallest bound, for a part of the time; a later call goes on from there."""
        self._deadline = self._started + share * LAST_SHARE * self._options.time_limit
        if self._pushed == 0:
            self._begin()
        while self._waiting and not self._finished():
            self.search.import_incumbent()
            leaf = heapq.heappop(self._waiting)[2]
            if not self._beaten(leaf.bound):
                self.worked += 1
                self._work_on(reopened(self.flat, leaf), leaf.raised)
            self._publish()
        return self._claim()

    def _begin(self) -> None:
        """Make the first branch: the whole problem, as the search at prices left it."""
        restriction = narrow(self.flat, np.ones(len(self.flat.unary), dtype=np.bool_))
        if restriction is not None:
            ascent = self._root.ascent
            start = ascent.best_prices, ascent.best_messages[restriction.messages]
            top = OpenLeaf(self.flat, restriction, self.bound, start)
            top.sweep(1)
            self._keep(top, raised=True)

    def _work_on(self, leaf: OpenLeaf, raised: bool) -> None:
        """Raise the bound of a branch and decode it; or, if that was done before, split it."""
        if raised:
            leaf.prove()
            if leaf.proof is None:
                self._stuck = True
                self._push(leaf, raised)
                return
            halves = None if self._wide else self._halves(leaf)
            if halves is None:
                for part in self._split(leaf):
                    self._keep(part, raised=False)
            else:
                for part in halves:
                    self._finish(part)
            return
        self._raise(leaf)
        self._finish(leaf)

    def _raise(self, leaf: OpenLeaf) -> None:
        """Raise the bound of a branch, and learn what its split has gained; at most the incumbent's cost counts."""
        objective = self.search.objective
        leaf.climb(BRANCH_STEPS, self._deadline, math.inf if objective is None else objective)
        if leaf.split is not None:
            worth = leaf.bound if objective is None else objective if leaf.closed else min(leaf.bound, objective)
            self._gains.record(leaf.split, worth)

    def _finish(self, leaf: OpenLeaf) -> None:
        """Decode a branch whose bound was raised, and solve what is small in it."""
        if leaf.closed or self._beaten(leaf.bound):
            return
        self._decode(leaf)
        self._settle(leaf)
        self._keep(leaf, raised=True)

    def _keep(self, leaf: OpenLeaf, raised: bool) -> None:
        """Remember a branch unless it is empty or holds nothing better than the incumbent."""
        if leaf.closed or self._beaten(leaf.bound):
            return
        objective = self.search.objective
        kept = leaf if objective is None else leaf.fix_by_reduced_cost(objective)
        if kept is None:
            return
        starts, left = kept.flat.graph.offset[:-1], kept.restriction.left
        if left.sum() == len(starts):
            # One assignment is left: whatever it is worth, there is nothing to branch on.
            self.search.offer(kept.root_choices(np.flatnonzero(left) - starts))
            return
        self._push(kept, raised)

    def _push(self, leaf: OpenLeaf, raised: bool) -> None:
        self._pushed += 1
        heapq.heappush(self._waiting, (leaf.bound, self._pushed, leaf.stored(raised)))

    def _split(self, leaf: OpenLeaf) -> Iterable[OpenLeaf]:
        """Try the most promising nodes; return the parts of the one whose parts have the highest bounds."""
        candidates = self._candidates(leaf)
        if len(candidates) == 1:
            return self._parts(leaf, candidates[0])
        best: list[OpenLeaf] = []
        best_score = -np.inf
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
        left = leaf.restriction.left
        sizes = np.add.reduceat(left, starts, dtype=np.int64)
        excess = np.minimum(leaf.proof.excess.astype(np.float64), leaf.proof.scale * 0.01 * self.flat.penalty)
        spread = np.add.reduceat(np.where(left, excess, 0.0), starts) / sizes
        degree = np.diff(graph.incident_start)
        score = np.where(sizes > 1, (degree + 0.01) * (spread + 1e-3 * leaf.proof.scale), -1.0)
        order = np.argsort(-score, kind="stable")[: self._tried_hubs]
        return [int(i) for i in order if score[i] > 0]

    def _halves(self, leaf: OpenLeaf) -> list[OpenLeaf] | None:
        """Split a node into strategies that use less and more than the mean, the most promising first.

        A strategy is the less likely, the more of the gap it costs beyond the bound. Nodes are tried while they promise
        more than the best so far has gained. None where no node's usage spreads.
        """
        assert leaf.proof is not None
        graph, objective = leaf.flat.graph, self.search.objective
        gap = (leaf.bound // 10 if objective is None else objective - leaf.bound) * leaf.proof.scale
        beyond: FloatArray = np.minimum(leaf.proof.excess * (_COLD / max(gap, 1)), _NEVER)
        likely = np.exp(-beyond)
        priced = expected_usage(leaf.flat, leaf.ascent.best_prices, leaf.ascent.best_messages)
        likely[~leaf.restriction.left] = 0.0
        likely /= np.repeat(np.add.reduceat(likely, graph.offset[:-1]), graph.sizes)
        mixture = Mixture(graph.offset, leaf.restriction.left, likely, priced)
        spread = mixture.spread()
        if not spread.any():
            return None
        best: list[OpenLeaf] = []
        most = -1.0
        for candidate in self._gains.candidates(spread):
            if candidate.promised <= most or (best and self._out_of_time()):
                break
            own = self._entries(leaf, candidate.node)
            groups = [own[half[own]] for half in mixture.halves(candidate.node)]
            split = Split(candidate.node, candidate.spread, leaf.bound)
            parts = list(self._branches(leaf, own, groups, split))
            for part in parts:
                self._raise(part)
            open_parts = [part for part in parts if not (part.closed or self._beaten(part.bound))]
            gained = float(min((part.bound for part in open_parts), default=leaf.bound) - leaf.bound)
            if gained > most or len(open_parts) < 2:
                best, most = open_parts, gained
            if len(open_parts) < 2:
                break
        return best

    def _parts(self, leaf: OpenLeaf, node: int) -> Iterator[OpenLeaf]:
        """Split a node's strategies: the cheapest few alone, all others together; drop empty parts."""
        assert leaf.proof is not None
        entries = self._entries(leaf, node)
        entries = entries[np.argsort(leaf.proof.excess[entries], kind="stable")]
        groups = [entries[g : g + 1] for g in range(BRANCHES - 1)] + [entries[BRANCHES - 1 :]]
        return self._branches(leaf, entries, groups)

    def _entries(self, leaf: OpenLeaf, node: int) -> IntArray:
        """Return the places of a node's strategies that are left."""
        first, end = leaf.flat.graph.offset[node : node + 2]
        places: IntArray = first + np.flatnonzero(leaf.restriction.left[first:end])
        return places

    def _branches(
        self, leaf: OpenLeaf, entries: IntArray, groups: Iterable[IntArray], split: Split | None = None
    ) -> Iterator[OpenLeaf]:
        """Make a branch of each group of a node's ``entries``; drop empty ones."""
        everything = leaf.kept()
        for side, group in enumerate(groups):
            if not len(group):
                continue
            allowed = everything.copy()
            allowed[leaf.restriction.entries[entries]] = False
            allowed[leaf.restriction.entries[group]] = True
            part = leaf.narrowed(allowed)
            if part is not None:
                part.split = None if split is None else split._replace(side=side)
                # Without sweeps a part still has its parent's bound.
                if not self._out_of_time():
                    part.sweep(PAIRS)
                yield part

    def _settle(self, leaf: OpenLeaf) -> None:
        """Solve what is small in a branch: that finds assignments, and may raise its bound."""
        objective, begun = self.search.objective, time.monotonic()
        if objective is None or self._out_of_time() or not self._has_share(SETTLING_SHARE, self._settling_seconds):
            return
        most = SETTLED_SECONDS if self._options.iteration_limit is None else math.inf
        options = replace(self._options, time_limit=min(most, self._deadline - begun))
        found = settle(self.search.problem, leaf, objective, options)
        if found.choices is not None:
            self.search.offer_original(found.choices)
        if found.bound is not None:
            leaf.bound = max(leaf.bound, found.bound)
        self._settling_seconds += time.monotonic() - begun

    def _decode(self, leaf: OpenLeaf) -> None:
        """Look for a better incumbent in a branch."""
        begun = time.monotonic()
        if not self._has_share(self._decoding_share, self._decoding_seconds):
            return
        prices = leaf.ascent.best_prices
        for by_decimation in (False, True):
            if self._out_of_time():
                break
            decoded = decimate(leaf.ascent, prices, self._random) if by_decimation else leaf.ascent.choices
            self.search.finish_grown(leaf.root_choices(decoded), prices, visits=2)
        self._decoding_seconds += time.monotonic() - begun

    def _has_share(self, share: float, spent: float) -> bool:
        """Whether what has taken so many seconds may take more; always where iterations count."""
        most = share * (time.monotonic() - self._branching_since)
        return self._options.iteration_limit is not None or spent <= most

    def _beaten(self, bound: int) -> bool:
        return self.search.objective is not None and bound >= self.search.objective

    def _publish(self) -> None:
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
        self._publish()
        iterations = self.root_iterations + self.worked
        message = f"{self.worked} branches, {len(self._waiting)} open"
        if self.search.best is None:
            if not self._waiting:
                return Claim(None, None, proved_infeasible=True, message=message, iterations=iterations)
            return Claim(None, self.bound, message=message, iterations=iterations)
        return Claim(self.flat.original_choices(self.search.best), self.bound, message=message, iterations=iterations)
