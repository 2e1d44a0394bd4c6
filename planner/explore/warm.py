"""Solving a case of a step from what is known of others: less memory, one more pin, one pin less.

1. A known decision that the case contains is taken as it is where no case around it costs less, and one of these was
   searched to the gap that is asked for, or for as long. So the case itself is searched again where it was interrupted
   or more time is given; its decision is where that search begins, and its bound holds.
2. Else the former decision is repaired: all operators but those near the changed ones keep their strategies, and the
   small problem that is left is solved by prices; the neighbourhood grows up to the whole problem while time is left.
3. Where that proves nothing, the whole problem is solved as a first time, from the best decision so far. A bound of a
   case around it is a bound of the case, so that the search ends as soon as it is near.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from formulations.problem.solution import KnownBound, Progress, SolveOptions, SolveResult, Status
from formulations.solvers import DEFAULT_SOLVER, SolverPool, solve
from formulations.solvers.peaks.minimum_peak import MinimumPeak
from formulations.solvers.processes.worker import Ending
from formulations.step.solving.context import Candidate, FreeDecision, SolveContext
from formulations.step.solving.driver import solve_step
from formulations.step.solving.pinned import Pins, pinned
from formulations.step.solving.search import LEAST_SECONDS, cheaper
from formulations.step.solving.solved import SolvedStep, certified
from formulations.step.solving.step_problem import StepProblem
from formulations.step.training_step import StepDecision
from planner.common.infeasibility import refusal
from planner.explore.known import Case, Knowledge, Solution, is_near
from planner.explore.pins import allowed_by, with_pins_named
from planner.explore.repair import Repair
from planner.plan.decision import Pin
from planner.session.planning import PlanningSession
from planner.session.request import PlanRequest

QUICK = "lagrangian"
"""Solver of repairs where the default is asked for: one process, and a proof of small problems at once."""

REPAIR_SHARE = 0.7
"""Part of the time for repairs, where there is a decision to repair."""

LEAST_WHOLE_SECONDS = 5.0
"""Time below which a quick search does not solve the whole problem, where a decision is known."""


@dataclass
class WarmSolver:
    """Solves cases of one session, each from what is known of the others.

    Parameters
    ----------
    session
        The traced step with its strategies and tables.
    pool
        Workers that stay warm.
    knowledge
        What is known; every solution is added.
    starts
        Decisions of other origin to begin from, where a case contains them.
    """

    session: PlanningSession
    pool: SolverPool
    knowledge: Knowledge = field(default_factory=Knowledge)
    starts: list[StepDecision] = field(default_factory=list)
    _built: dict[Case, StepProblem] = field(default_factory=dict)
    _interrupted: bool = False

    def case(self, request: PlanRequest, pins: frozenset[Pin] = frozenset()) -> Case:
        """The case of a request with pins."""
        return Case.of(request, self.session.budget(request.memory).tensor_bytes, pins)

    def solve(
        self,
        request: PlanRequest,
        pins: frozenset[Pin] = frozenset(),
        progress: Callable[[Progress], None] | None = None,
        second: bool = True,
        quick: bool = False,
    ) -> Solution:
        """Solve a case and certify its plan.

        Parameters
        ----------
        request
            Its time limit is that of the search. Nothing is solved where the known solution is within the gap, or was
            searched for at least as long and not interrupted; else the new one is no worse than it.
        pins
            Decisions of the user.
        progress
            Called with every better incumbent or bound.
        second
            Whether to bound the cost by a second method where none of a case around it is known.
        quick
            Whether the repair of a known decision is enough where the time left is short for the whole problem, and
            whether what is known is enough however short its search, unless that was interrupted.

        Raises
        ------
        ExploreError
            Pins that cannot be kept.
        InfeasibleError
            No plan within the limit keeps the pins, or none was found.
        """
        case = self.case(request, pins)
        known = self.knowledge.of(case)
        if known is not None and self._is_final(known, request, quick):
            return known
        started = time.perf_counter()
        solved, searched = self._solved(request, case, progress, quick)
        if known is not None:
            searched = max(searched, known.searched_seconds)
            if solved.result.objective is None or known.executed.cost < solved.result.objective:
                result = certified(solved.result, solved.result.known_bound, known.executed.cost)
                solved = replace(solved, decision=known.decision, result=result)
        spent = {"solve": time.perf_counter() - started}
        is_first = all(other.case == case for other in self.knowledge.around(case))
        return self.certified(request, case, solved, spent, searched, second and is_first)

    def certified(
        self,
        request: PlanRequest,
        case: Case,
        solved: SolvedStep,
        times: dict[str, float],
        searched_seconds: float,
        second: bool = True,
    ) -> Solution:
        """The solution of a solved case, with its replayed plan; it is kept."""
        others = [known.second for known in self.knowledge.around(case) if known.second is not None]
        bounded = [found for found in others if found.bound is not None]
        other = max(bounded, key=lambda found: found.bound or 0, default=None)
        if other is None and not second:
            other = SolveResult(Status.NO_SOLUTION, None, None, None, None, "none", 0.0, 0.0, 0, ())
        plan = self.session.certify(request, solved, self.pool, times, other, sorted(case.pins, key=str))
        if other is None:
            check = plan.record.certificate.cross_checks[0]
            other = SolveResult(check.status, None, None, check.bound_ns, None, check.solver, check.seconds, 0.0, 0, ())
        bound = solved.result.known_bound
        certificate = plan.record.certificate
        if plan.decision.predicted.bound_ns != (None if bound is None else bound.value) and certificate.proof:
            assert plan.decision.predicted.bound_ns is not None
            bound = KnownBound(plan.decision.predicted.bound_ns, certificate.proof, certificate.solver)
        executed = self.session.execute(solved.decision, case.tensor_bytes)
        second_bound = other if other.bound is not None else None
        solution = Solution(case, solved.decision, executed, bound, plan, second_bound, searched_seconds)
        self.knowledge.add(solution)
        return solution

    def improved(self, request: PlanRequest, former: Solution, better: Solution) -> Solution:
        """The solution of a case with the decision of a case in it, which turned out to be cheaper."""
        found = SolveResult(Status.FEASIBLE, None, None, None, None, request.solver, 0.0, 0.0, 0, ())
        result = certified(found, former.bound, better.executed.cost)
        solved = SolvedStep(better.decision, result, lambda: self.problem(request).problem)
        return self.certified(request, former.case, solved, {}, former.searched_seconds)

    def problem(self, request: PlanRequest) -> StepProblem:
        """The problem of a request without pins, built once."""
        case = self.case(request)
        if case not in self._built:
            self._built[case] = self.session.problem(request, self.pool)
        return self._built[case]

    # ---------------------------------------------------------------- search

    @staticmethod
    def _is_final(known: Solution, request: PlanRequest, quick: bool) -> bool:
        """Whether a search for a solution's case as the request asks for would find nothing that is worth its time."""
        searched = known.searched_seconds
        return known.is_near(request.gap) or (searched > 0 if quick else searched >= request.time_limit)

    def _solved(
        self, request: PlanRequest, case: Case, progress: Callable[[Progress], None] | None, quick: bool
    ) -> tuple[SolvedStep, float]:
        """What the search for a case finds, and the seconds that count as those of the search."""
        begun, self._interrupted = time.monotonic(), False
        deadline = begun + request.time_limit
        whole = self.problem(request)
        left = allowed_by(self.session.space, whole, sorted(case.pins, key=str))
        built = pinned(whole, left)
        bound, around = self.knowledge.bound(case), self.knowledge.around(case)
        best = self._best_known(built, case)
        cheapest = min((known.executed.cost for known in around), default=None)
        is_final = any(self._is_final(known, request, quick) for known in around)
        if best is None or cheapest is None or best.executed.cost > cheapest or not is_final:
            best, bound = self._repaired(request, case, built, left, best, bound, deadline)
            if self._interrupted and best is None:
                raise KeyboardInterrupt
            repaired = quick and best is not None and self.knowledge.of(case) is None
            enough = self._interrupted or (repaired and deadline - time.monotonic() < LEAST_WHOLE_SECONDS)
            if not enough and not self._is_near(best, bound, request.gap):
                solved = self._whole(request, case, built, best, bound, deadline, progress)
                return solved, 0.0 if Ending.INTERRUPTED in solved.result.message else request.time_limit
        assert best is not None
        found = SolveResult(
            Status.FEASIBLE, None, best.executed.cost, None, None, request.solver, 0.0, 0.0, 0, (best.executed.peak,)
        )
        if self._interrupted:
            found = replace(found, message=Ending.INTERRUPTED)
        solved = SolvedStep(best.decision, certified(found, bound, best.executed.cost), lambda: built.problem)
        return solved, 0.0 if self._interrupted else time.monotonic() - begun

    def _whole(
        self,
        request: PlanRequest,
        case: Case,
        built: StepProblem,
        best: Candidate | None,
        bound: KnownBound | None,
        deadline: float,
        progress: Callable[[Progress], None] | None,
    ) -> SolvedStep:
        """Solve the whole problem from the best known decision, in the time that is left."""
        seconds = max(LEAST_SECONDS, deadline - time.monotonic())
        options = SolveOptions(seconds, request.seed, request.gap, workers=request.workers)
        first = not self.knowledge.solutions
        free = self.session.free if first else FreeDecision(None, _higher(bound, self.session.free.bound))
        known = () if best is None else (best.decision,)
        execute = partial(self.session.execute, limit=case.tensor_bytes)
        context = SolveContext(execute, request.solver, options, self.pool, progress, known, free)
        context.warm_up()
        found = solve_step(built, context)
        if isinstance(found, MinimumPeak):
            budget = self.session.budget(request.memory)
            error = refusal(found, budget.tensor_bytes, budget.reserve_bytes)
            if not case.pins:
                raise error
            raise with_pins_named(error, case.pins)
        cost = found.result.objective
        assert cost is not None, "a solved step has a decision"
        return replace(found, result=certified(found.result, _higher(found.result.known_bound, bound), cost))

    def _best_known(self, built: StepProblem, case: Case) -> Candidate | None:
        """The cheapest known decision of a problem that is within its limit."""
        best: Candidate | None = None
        for decision in self.starts:
            best = cheaper(best, self._fitting(built, decision, case))
        for known in self.knowledge.solutions:
            same = known.case.host_memory == case.host_memory
            if same and (best is None or known.executed.cost < best.executed.cost):
                best = cheaper(best, self._fitting(built, known.decision, case))
        return best

    def _repaired(
        self,
        request: PlanRequest,
        case: Case,
        built: StepProblem,
        left: Pins,
        best: Candidate | None,
        bound: KnownBound | None,
        deadline: float,
    ) -> tuple[Candidate | None, KnownBound | None]:
        """The best decision and bound after repairs of the decision of the closest case around this one."""
        ends = time.monotonic() + REPAIR_SHARE * (deadline - time.monotonic())
        around = self.knowledge.around(case)
        if not around:
            return best, bound
        former = min(around, key=lambda known: (-len(known.case.pins), known.executed.cost))
        try:
            choices = self.problem(request).encode(former.decision)
        except ValueError:  # under another limit other reruns are possible
            return best, bound
        repair = Repair(self.session.space.model, built, left, former.decision, choices)
        if not repair.changed:
            return best, bound
        best = cheaper(best, self._fitting(built, repair.by_rule(), case))
        solver = QUICK if request.solver == DEFAULT_SOLVER else request.solver
        for part in (*repair.neighbourhoods(), built):
            seconds = ends - time.monotonic()
            if seconds < LEAST_SECONDS or self._is_near(best, bound, request.gap):
                break
            options = SolveOptions(seconds, request.seed, request.gap, workers=request.workers)
            if best is not None and part.contains(best.decision):
                options = replace(options, initial_choices=part.encoded(best.decision))
            found = solve(part.problem, solver, options, None, self.pool)
            if found.choices is not None:
                best = cheaper(best, self._fitting(built, part.decode(found.choices), case))
            if part is built and built.relaxation is None:
                bound = _higher(bound, found.known_bound)
            if Ending.INTERRUPTED in found.message:
                self._interrupted = True
                break
        return best, bound

    def _fitting(self, built: StepProblem, decision: StepDecision, case: Case) -> Candidate | None:
        """A decision executed, or None where the problem does not contain it or it is over the limit."""
        if not built.contains(decision):
            return None
        executed = self.session.execute(decision, case.tensor_bytes)
        return Candidate(decision, executed) if executed.peak <= case.tensor_bytes else None

    @staticmethod
    def _is_near(best: Candidate | None, bound: KnownBound | None, gap: float) -> bool:
        return best is not None and is_near(best.executed.cost, bound, gap)


def _higher(first: KnownBound | None, second: KnownBound | None) -> KnownBound | None:
    if first is None or second is None:
        return second if first is None else first
    return second if second.value > first.value else first
