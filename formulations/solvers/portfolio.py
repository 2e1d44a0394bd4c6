"""Presolve, then the solvers that suit the size of what remains, side by side.

A small core goes to HiGHS (LP with lazily added usage rows, reduced costs, branch and cut) and to memory prices at
once; they exchange incumbents, and the better bound counts. On a large one, where even the LP takes too long, memory
prices go on looking for assignments, and branch and cut starts where prices of its own have left little open. Every
member is a worker process: whatever becomes of it, what it had found stays.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import replace

from formulations.checker import check
from formulations.linear_model import linear_columns
from formulations.presolve import Presolved, presolve
from formulations.problem import StrategyProblem
from formulations.solution import Claim, Progress, SolveOptions, relative_gap
from formulations.solvers.base import Desk
from formulations.solvers.registry import find_solver
from formulations.solvers.team import Choices, Event, Team
from formulations.solvers.worker import Ending, WorkerOutcome, WorkerStartError

PRICES, BRANCH_AND_CUT, PRICES_AND_BRANCH = "lagrangian", "highs", "price_and_branch"
MOST_COLUMNS = 150_000
"""Columns of the linear model up to which branch and cut starts at once."""

_PRESOLVE_SHARE = 0.5
_CLEANUP_SHARE = 0.02
_MOST_CLEANUP_SECONDS = 1.0
_OVERTIME_SECONDS = 0.5
_POLL_SECONDS = 0.1
_CHECK_EFFORT = 10
"""Checking incumbents takes at most about one part in this many of the time."""


def solve(problem: StrategyProblem, options: SolveOptions, desk: Desk) -> Claim:
    """Solve with all that is there.

    With ``iteration_limit`` the members run one after another, each from the best so far, and the result is
    deterministic as long as the time limit does not cut it short.
    """
    started = time.monotonic()
    before = time.process_time()
    warming = threading.Thread(target=_warm, args=(desk,), daemon=True)
    warming.start()
    try:
        reduced = presolve(problem, deadline=started + _PRESOLVE_SHARE * options.time_limit)
    except KeyboardInterrupt:
        return Claim(None, None, message="interrupted")
    finally:
        warming.join()
    desk.spend(time.process_time() - before, 0)
    shape = f"presolve: {reduced.before.nodes} nodes to {reduced.after.nodes}"
    if reduced.contradiction:
        return Claim(None, None, proved_infeasible=True, message=f"{shape}; {reduced.contradiction}")
    if all(node.size == 1 for node in reduced.problem.nodes):
        only = (0,) * len(reduced.problem.nodes)
        cost = check(reduced.problem, only).objective
        return Claim(reduced.lift(only), None if cost is None else cost + reduced.offset, message=shape)
    return _Search(reduced, options, desk, started, shape).run()


def _warm(desk: Desk) -> None:
    """Start a process while presolve runs; a failure will be met again, and told, when it is needed."""
    try:
        desk.workers.warm(find_solver(PRICES))
    except WorkerStartError:
        return


def members_for(problem: StrategyProblem) -> tuple[str, ...]:
    """Return the solvers that suit the size of a reduced problem."""
    small = linear_columns(problem) <= MOST_COLUMNS
    return (PRICES, BRANCH_AND_CUT if small else PRICES_AND_BRANCH)


class _Search:
    """The members' work on a reduced problem; only the calling thread touches it."""

    def __init__(self, reduced: Presolved, options: SolveOptions, desk: Desk, started: float, shape: str) -> None:
        self.reduced, self.options, self.desk, self.started = reduced, options, desk, started
        self.best: tuple[int, Choices] | None = None
        """Cost and choices in the reduced problem, checked there."""
        self.bound: int | None = None
        self.settled = False
        """Whether an exact member ended by itself: no other will find more."""
        self.infeasible = False
        self.iterations = 0
        self.notes = [shape]
        self._pending: dict[str, Choices] = {}
        self._next_check = -math.inf
        self._peak_rss_bytes = 0

    def run(self) -> Claim:
        """Run the members and return what they found."""
        start = self.options.initial_choices
        if start is not None:
            projected = self.reduced.lift.project(start)
            if projected is not None:
                self._pending["initial choices"] = projected
        members = members_for(self.reduced.problem)
        shifts = [members] if self.options.iteration_limit is None else [(member,) for member in members]
        with Team(self.desk.workers) as team:
            try:
                for shift in shifts:
                    self._check(team)
                    self._shift(team, shift)
            except KeyboardInterrupt:
                self.notes.append("interrupted")
            team.stop()
            self._read(team, 0.0)
            self._next_check = -math.inf
            self._check(team)
        self.desk.spend(0.0, self._peak_rss_bytes)
        return self._claim()

    def _shift(self, team: Team, members: Sequence[str]) -> None:
        """Let members run side by side until they are done, or nothing is left to do."""
        cleanup = min(_MOST_CLEANUP_SECONDS, _CLEANUP_SHARE * self.options.time_limit)
        remaining = self._remaining() - cleanup
        if remaining <= 0 or self._done():
            return
        start = None if self.best is None else self.best[1]
        options = replace(self.options, time_limit=remaining, relative_gap=0.0, initial_choices=start)
        for k, member in enumerate(members):
            team.start(member, self.reduced.problem, replace(options, seed=options.seed + k))
        while team.running and not self._done() and self._remaining() > -_OVERTIME_SECONDS:
            self._read(team, _POLL_SECONDS)
            self._check(team)

    def _remaining(self) -> float:
        return self.started + self.options.time_limit - time.monotonic()

    def _read(self, team: Team, timeout: float) -> None:
        for event in team.events(timeout):
            if event.progress is not None:
                self._raise_bound(event.progress.bound, event.source)
            if event.incumbents:
                self._pending[event.source] = event.incumbents[-1]
            if isinstance(event.ended, str):
                self.notes.append(f"{event.source}: {event.ended}")
            elif event.ended is not None:
                self._end(event, event.ended)

    def _end(self, event: Event, outcome: WorkerOutcome) -> None:
        self.desk.spend(outcome.cpu_seconds, 0)
        self._peak_rss_bytes += outcome.peak_rss_bytes
        claim = outcome.claim
        if claim is None:
            if outcome.ending is not Ending.STOPPED:
                self.notes.append(f"{event.source} {outcome.ending}: {outcome.message}")
            return
        self.iterations += claim.iterations
        if claim.choices is not None:
            self._pending[event.source] = claim.choices
        if claim.proved_infeasible:
            self.infeasible = True
            self.notes.append(f"{event.source}: {outcome.message}")
            return
        if claim.message:
            self.notes.append(f"{event.source}: {claim.message}")
        self._raise_bound(claim.bound, event.source)
        self.settled |= event.source == BRANCH_AND_CUT and claim.choices is not None

    def _check(self, team: Team) -> None:
        """Check what members have found, pass the best on and report it; not more often than that pays."""
        begin = time.monotonic()
        if not self._pending or begin < self._next_check:
            return
        pending, self._pending = self._pending, {}
        for source, choices in pending.items():
            report = check(self.reduced.problem, choices)
            if not report.ok:
                self.notes.append(f"{source} offered an assignment that does not hold: {report.violations[0].message}")
            elif report.objective is not None and (self.best is None or report.objective < self.best[0]):
                self.best = (report.objective, choices)
                team.tell_others(choices, source)
                self.desk.incumbent(self.reduced.lift(choices), source)
        self._next_check = time.monotonic() + _CHECK_EFFORT * (time.monotonic() - begin)

    def _raise_bound(self, bound: int | None, source: str) -> None:
        if bound is not None and (self.bound is None or bound > self.bound):
            self.bound = bound
            seconds = time.monotonic() - self.started
            self.desk.report(Progress(seconds, None, bound + self.reduced.offset, source))

    def _done(self) -> bool:
        if self.settled or self.infeasible:
            return True
        if self.best is None or self.bound is None:
            return False
        gap = relative_gap(self.best[0] + self.reduced.offset, self.bound + self.reduced.offset)
        return gap is not None and gap <= self.options.relative_gap

    def _claim(self) -> Claim:
        message = "; ".join(self.notes)
        if self.infeasible:
            return Claim(None, None, proved_infeasible=True, message=message, iterations=self.iterations)
        choices = None if self.best is None else self.reduced.lift(self.best[1])
        bound = None if self.bound is None else self.bound + self.reduced.offset
        return Claim(choices, bound, message=message, iterations=self.iterations)
