"""Presolve, then the solvers that suit the size of what remains, side by side.

A small core goes to branch and bound on linear relaxations and to memory prices at once; they exchange incumbents and
bounds. On a large one, where even one relaxation takes too long, memory prices go on looking for assignments, and
branching starts where prices of its own have left little open. Where blocks repeat, as in a deep model, their columns
come before prices. What a solver only claims, a member with exact bounds proves or refutes. Every member is a worker
process: whatever becomes of it, what it had found stays.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from formulations.presolve import Presolved, is_deep, lean_presolve
from formulations.presolve.workspace.tunables import PRESOLVE_SHARE
from formulations.problem.checker import check
from formulations.problem.solution import Claim, Progress, Proof, SolveOptions
from formulations.problem.strategy_problem import StrategyProblem
from formulations.solvers.processes.transfer import SharedProblem, share
from formulations.solvers.processes.worker import Ending, WorkerOutcome
from formulations.solvers.protocol.exchange import Update
from formulations.solvers.protocol.registry import find_solver
from formulations.solvers.running.bounds import Bounds, by_trust
from formulations.solvers.running.coordination import CoordinatorContext
from formulations.solvers.running.lanes import BLOCKS, PRICES, PROVING, Lane, Turn, fair_share_of_memory, lanes_for
from formulations.solvers.running.members import Choices, Event, Members
from formulations.solvers.running.tunables import (
    CHECK_EFFORT,
    CLEANUP_SHARE,
    LAST_WORDS_SECONDS,
    MOST_CLEANUP_SECONDS,
    WORTH_WARMING_SECONDS,
)

_WARMING = True
"""Technique: the first worker starts while presolve runs."""

_OVERTIME_SECONDS = 0.5
"""Not tunable: seconds after the limit at which members that do not return are stopped."""

_POLL_SECONDS = 0.1
"""Not tunable: how often events are waited for, in seconds."""


def solve(problem: StrategyProblem, options: SolveOptions, context: CoordinatorContext) -> Claim:
    """Solve with all that is there.

    With ``workers=1`` or an ``iteration_limit`` the members run one after another, each from the best so far, and the
    result is deterministic as long as the time limit does not cut it short: those that could go on for ever have a
    limit of iterations, by default one of the portfolio's own.
    """
    started = time.monotonic()
    before = time.process_time()
    try:
        deep = is_deep(problem)
        with _warming(context, BLOCKS if deep else PRICES):
            reduced = lean_presolve(problem, started + PRESOLVE_SHARE * options.time_limit)
    except KeyboardInterrupt:
        return Claim(None, None, message="interrupted")
    context.spend(time.process_time() - before, 0)
    shape = f"presolve: {reduced.before.nodes} nodes to {reduced.after.nodes}"
    if reduced.contradiction:
        return Claim(None, None, proved_infeasible=True, message=f"{shape}; {reduced.contradiction}", certified=True)
    if all(node.size == 1 for node in reduced.problem.nodes):
        only = (0,) * len(reduced.problem.nodes)
        cost = check(reduced.problem, only).objective
        return Claim(reduced.lift(only), None if cost is None else cost + reduced.offset, message=shape)
    return _Search(reduced, options, context, started, shape, deep=deep).run()


@contextlib.contextmanager
def _warming(context: CoordinatorContext, solver: str) -> Iterator[None]:
    """Start a process for a solver beside what is done meanwhile, if that takes long enough."""
    if not _WARMING:
        yield
        return
    timer = threading.Timer(WORTH_WARMING_SECONDS, context.workers.warm_soon, (find_solver(solver),))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


@dataclass(slots=True)
class _Running:
    """A lane at work: its member, and the turns after it."""

    rest: Lane
    solver: str = ""
    peak_rss_bytes: int = 0

    @property
    def proves(self) -> bool:
        """Whether a member that proves optima is at work in it, or will be."""
        return self.solver in PROVING or any(turn.solver in PROVING for turn in self.rest)


class _Search:
    """The members' work on a reduced problem; only the calling thread touches it."""

    def __init__(
        self,
        reduced: Presolved,
        options: SolveOptions,
        context: CoordinatorContext,
        started: float,
        shape: str,
        *,
        deep: bool,
    ) -> None:
        self.deep = deep
        self.reduced, self.options, self.context, self.started = reduced, options, context, started
        self.best: tuple[int, Choices] | None = None
        """Cost and choices in the reduced problem, checked there."""
        self.bounds = Bounds()
        """Bounds on the cost in the reduced problem."""
        self.infeasible = self.certified = False
        self.iterations = 0
        self.notes = [shape]
        self._pending: dict[str, Choices] = {}
        self._next_check = -math.inf
        self._lanes: list[_Running] = []
        self._turns = 0

    @cached_property
    def _shared(self) -> SharedProblem:
        """The reduced problem in memory that all members map."""
        return share(self.reduced.problem)

    def run(self) -> Claim:
        """Run the members and return what they found."""
        start = self.options.initial_choices
        if start is not None:
            projected = self.reduced.lift.project(start)
            if projected is not None:
                self._pending["initial choices"] = projected
        with Members(self.context.workers) as team:
            try:
                self._check(team)
                self._work(team)
            except KeyboardInterrupt:
                self.notes.append("interrupted")
            team.stop()
            self._read(team, 0.0)
            self._check(team, at_once=True)
        self.context.spend(0.0, sum(lane.peak_rss_bytes for lane in self._lanes))
        return self._claim()

    def _work(self, team: Members) -> None:
        """Let the lanes run side by side until they are done, or nothing is left to do."""
        self._lanes = [_Running(lane) for lane in lanes_for(self.reduced.problem, self.options, deep=self.deep)]
        begun = time.monotonic()
        while self._remaining() > -_OVERTIME_SECONDS:
            for lane in self._lanes:
                waits = lane.rest and lane.rest[0].head_start > time.monotonic() - begun and team.running
                if lane.solver not in team.running and not waits:
                    self._begin(team, lane)
            if self._done():
                # A member that has just proved the optimum returns in a moment; killed, it would have to be replaced.
                self._read(team, LAST_WORDS_SECONDS)
            if not team.running or self._done():
                return
            self._read(team, _POLL_SECONDS)
            self._ask_others()
            self._check(team)

    def _begin(self, team: Members, lane: _Running) -> None:
        """Let the next member of a lane that has time left begin, from the best so far."""
        cleanup = min(MOST_CLEANUP_SECONDS, CLEANUP_SHARE * self.options.time_limit)
        while lane.rest and not self._done():
            turn, lane.rest = lane.rest[0], lane.rest[1:]
            seconds = self._remaining() - (1.0 - turn.until) * self.options.time_limit - cleanup
            if seconds > 0 and not (turn.without_incumbent and self.best is not None):
                self._check(team, at_once=True)
                lane.solver = turn.solver
                options = self._options_of(turn, seconds)
                team.start(turn.solver, self._shared, options, Update(bound=self.bounds.exact))
                return

    def _options_of(self, turn: Turn, seconds: float) -> SolveOptions:
        self._turns += 1
        return replace(
            self.options,
            time_limit=seconds,
            relative_gap=0.0,
            iteration_limit=self.options.iteration_limit or turn.iterations,
            memory_limit_bytes=self.options.memory_limit_bytes or fair_share_of_memory(len(self._lanes)),
            initial_choices=None if self.best is None else self.best[1],
            seed=self.options.seed + self._turns - 1,
        )

    def _remaining(self) -> float:
        return self.started + self.options.time_limit - time.monotonic()

    def _read(self, team: Members, timeout: float) -> None:
        for event in team.events(timeout):
            if event.progress is not None:
                self._raise_bounds(team, event.progress.bound, event.progress.claimed, event.source)
            if event.incumbents:
                self._pending[event.source] = event.incumbents[-1]
            if isinstance(event.ended, str):
                self.notes.append(f"{event.source}: {event.ended}")
                self._lane_of(event).solver = ""
            elif event.ended is not None:
                self._end(team, event, event.ended)

    def _ask_others(self) -> None:
        found = self.context.from_others()
        projected = None if found is None else self.reduced.lift.project(found)
        if projected is not None:
            self._pending["others"] = projected

    def _end(self, team: Members, event: Event, outcome: WorkerOutcome) -> None:
        self.context.spend(outcome.cpu_seconds, 0)
        lane = self._lane_of(event)
        lane.solver = ""
        lane.peak_rss_bytes = max(lane.peak_rss_bytes, outcome.peak_rss_bytes)
        claim = outcome.claim
        if claim is None:
            if outcome.ending is not Ending.STOPPED:
                self.notes.append(f"{event.source} {outcome.ending}: {outcome.message}")
            return
        self.iterations += claim.iterations
        if claim.choices is not None:
            self._pending[event.source] = claim.choices
        if claim.proved_infeasible:
            self.notes.append(f"{event.source}: {outcome.message}")
            certified = claim.certified and find_solver(event.source).is_built_in
            if self.best is None or certified:  # what is found already refutes what is only claimed
                self.infeasible = True
                self.certified |= certified
            return
        if claim.message:
            self.notes.append(f"{event.source}: {claim.message}")
        self._raise_bounds(team, claim.bound, claim.claimed, event.source)

    def _lane_of(self, event: Event) -> _Running:
        return next(lane for lane in self._lanes if lane.solver == event.source)

    def _check(self, team: Members, at_once: bool = False) -> None:
        """Check what members have found, pass the best on and report it; not more often than that pays."""
        begin = time.monotonic()
        if not self._pending or (begin < self._next_check and not at_once):
            return
        pending, self._pending = self._pending, {}
        for source, choices in pending.items():
            report = check(self.reduced.problem, choices)
            if not report.ok:
                self.notes.append(f"{source} offered an assignment that does not hold: {report.violations[0].message}")
            elif report.objective is not None and (self.best is None or report.objective < self.best[0]):
                self.best = (report.objective, choices)
                self.bounds.refute(report.objective)
                team.publish(Update(choices=choices), source)
                self.context.incumbent(self.reduced.lift(choices), source)
        self._next_check = time.monotonic() + CHECK_EFFORT * (time.monotonic() - begin)

    def _raise_bounds(self, team: Members, exact: int | None, claimed: int | None, source: str) -> None:
        """Keep and report bounds; members only learn exact ones, so that their claims stay independent."""
        spec = find_solver(source)
        exact, claimed = by_trust(spec, exact, claimed)
        is_raised = self.bounds.raise_exact(exact, source)
        if is_raised:
            team.publish(Update(bound=exact), source)
        if self.bounds.claim(claimed, spec.claimant) or is_raised:
            if self.best is not None:
                self.bounds.refute(self.best[0])
            seconds, offset = time.monotonic() - self.started, self.reduced.offset
            known, claim = (None if bound is None else bound + offset for bound in (exact, claimed))
            self.context.report(Progress(seconds, None, known, source, claimed=claim))

    def _done(self) -> bool:
        if self.infeasible or self.context.should_stop():
            return True
        offset = self.reduced.offset

        def accepts(objective: int, bound: int) -> bool:
            return self.options.accepts(objective + offset, bound + offset)

        objective = None if self.best is None else self.best[0]
        proof = self.bounds.proof(objective, accepts)
        if proof is Proof.CLAIMED:  # nothing better is to be found; without a member that proves it, that is all
            return bool(self._lanes) and not any(lane.proves for lane in self._lanes)
        return proof is not None

    def _claim(self) -> Claim:
        message = "; ".join(self.notes)
        if self.infeasible:
            return Claim(None, None, True, message, self.iterations, certified=self.certified)
        choices = None if self.best is None else self.reduced.lift(self.best[1])
        exact = self.bounds.exact
        bound = None if exact is None else exact + self.reduced.offset
        return Claim(choices, bound, message=message, iterations=self.iterations)
