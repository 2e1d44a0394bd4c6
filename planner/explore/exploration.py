"""An exploration: one step, its present plan, and what changes to it cost."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from formulations.problem.gc_pause import gc_paused
from formulations.problem.solution import KnownBound, Progress
from formulations.solvers import SolverPool
from planner.common.infeasibility import InfeasibleError
from planner.explore.changes import ClusterChange, WhatIf, recosted, translated
from planner.explore.errors import ExploreError
from planner.explore.known import Solution
from planner.explore.memory_prices import NOT_SOLVED, MemoryPrice
from planner.explore.pinning import PinnedPlans
from planner.explore.pins import pin_of
from planner.explore.targets import module_paths
from planner.explore.warm import WarmSolver
from planner.machine.cluster import DeviceSpec
from planner.plan.decision import NANOSECONDS, Pin
from planner.plan.document import Plan, schedule_of, verify_plan
from planner.plan.notes import INTERRUPTED
from planner.scheduling.decided import decision_of
from planner.session.planning import PlanningSession
from planner.session.request import PlanRequest

REPLAN_SHARE = 0.1
"""Part of the time of the first plan that the search for a plan with other pins has."""

LEAST_REPLAN_SECONDS = 0.5
"""Time that such a search has at least."""


class Exploration(PinnedPlans):
    """A step that is planned, changed and planned again, from what is known of all its plans.

    Use it in a ``with`` block or call :meth:`close`, which ends its solver processes; so does the end of the program.

    Parameters
    ----------
    session
        The traced step.
    request
        What every plan is asked for; its time limit is that of the first plan and of others without any decision to
        begin from.
    progress
        Called with every better incumbent or bound.
    pool
        Warm workers of someone else; processes of its own if None.

    Raises
    ------
    ExploreError
        The request overlaps communication.
    """

    def __init__(
        self,
        session: PlanningSession,
        request: PlanRequest | None = None,
        progress: Callable[[Progress], None] | None = None,
        pool: SolverPool | None = None,
    ) -> None:
        super().__init__()
        self.session = session
        self.request = request or PlanRequest()
        if self.request.overlap:
            raise ExploreError(
                "overlap: what-ifs and prices are of plans without it; explore such a plan, then plan with overlap and "
                "the same pins"
            )
        self.progress = progress
        own = SolverPool() if pool is None else None
        self._end = weakref.finalize(self, (lambda: None) if own is None else own.close)
        self.solver = WarmSolver(session, pool or own or SolverPool())

    @classmethod
    def of_plan(
        cls,
        plan: Plan,
        session: PlanningSession,
        request: PlanRequest,
        progress: Callable[[Progress], None] | None = None,
    ) -> Self:
        """An exploration whose present plan is a finished one, which is checked by replay and not solved again.

        Parameters
        ----------
        plan
            The plan, without overlap.
        session
            The step, mesh and cluster that it was made for.
        request
            What other plans are asked for; limits and formulation are those of the plan.
        progress
            As for the exploration.

        Raises
        ------
        ExploreError
            The plan overlaps communication.
        PlanError
            It was made for something else or does not hold.
        """
        options, certificate = plan.decision.options, plan.record.certificate
        request = replace(
            request,
            memory=options.memory_bytes,
            formulation=options.formulation,
            memory_model=options.memory_model,
            host_memory=options.host_memory_bytes,
            overlap=any(step.op in ("start", "join") for step in plan.decision.schedule.instructions),
        )
        here = cls(session, request, progress)
        costs, allowed = session.instruction_costs, session.allowed_strategies
        verify_plan(plan, session.graph, session.fingerprints, seconds=costs, allowed=allowed)
        decision = decision_of(session.space, schedule_of(plan, session.graph))
        bound = plan.decision.predicted.bound_ns
        case = here.solver.case(here.request, frozenset(options.pins))
        known = None if bound is None or not certificate.proof else KnownBound(bound, certificate.proof)
        executed = session.execute(decision, case.tensor_bytes)
        searched = 0.0 if INTERRUPTED in plan.record.notes else plan.record.times.get("solve", 0.0)
        here.solver.knowledge.add(Solution(case, decision, executed, known, plan, searched_seconds=searched))
        here.pins, here.first_seconds = options.pins, sum(plan.record.times.values())
        return here

    @property
    def plan(self) -> Plan:
        """The present plan; solved when it is first asked for, and :meth:`improve` searches on.

        Raises
        ------
        InfeasibleError
            No plan fits; the message names a limit that would be enough.
        """
        return self.solution.plan

    @property
    def solution(self) -> Solution:
        """The present plan with its decision."""
        return self._known or self._solve(self.pins, self.request.time_limit)

    @property
    def _known(self) -> Solution | None:
        return self.solver.knowledge.of(self.solver.case(self.request, frozenset(self.pins)))

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the modules that can be pinned."""
        return module_paths(self.session.space)

    @property
    def operators(self) -> tuple[str, ...]:
        """Identities of the operators that can be pinned, in the order of execution."""
        return tuple(operator.identity for operator in self.session.graph.operators if not operator.is_view)

    def whatif(self, change: ClusterChange) -> WhatIf:
        """Plan for a changed cluster, with the same pins, and put the present plan beside it as it would be there.

        Parameters
        ----------
        change
            Of the cluster, the limit or the mesh.

        Raises
        ------
        InfeasibleError
            No plan fits there.
        ValueError
            The mesh does not fit the changed cluster, or a pin cannot be kept there.
        """
        present = self.solution
        cluster, mesh = change.of(self.session.cluster), change.mesh or self.session.mesh
        session = PlanningSession(
            self.session.reference,
            cluster,
            mesh,
            self.session.optimizer.name,
            traced=self.session.traced,
            grad_accum=self.session.optimizer.micro_batches,
        )
        request = self.request if change.memory is None else replace(self.request, memory=change.memory)
        there = Exploration(session, request, self.progress, self.solver.pool)
        there.pins = self.pins
        decision = translated(self.session.space, session.space, present.decision)
        if not isinstance(decision, str):
            there.solver.starts.append(decision)
        same = recosted(session, decision, session.budget(request.memory).tensor_bytes, request.host_memory)
        return WhatIf(change, cluster, present.plan, same, there.plan)

    def _reach(self) -> tuple[int, DeviceSpec]:
        present = self.solution
        return min(present.case.tensor_bytes, present.plan.peak_bytes), self.session.cluster.device

    def _prices(
        self, limits: Sequence[int], time_limit: float | None, noticed: threading.Event
    ) -> Iterator[MemoryPrice]:
        seconds = self.request.time_limit if time_limit is None else time_limit
        found: dict[int, Solution | str] = {}
        for memory in reversed(limits):  # a bound for more memory is one for less
            found[memory] = NOT_SOLVED
            if noticed.is_set():
                continue
            request = replace(self.request, memory=memory, time_limit=seconds)
            try:
                found[memory] = self.solver.solve(request, frozenset(self.pins), self.progress)
            except InfeasibleError as error:
                found[memory] = str(error)
            except KeyboardInterrupt:
                noticed.set()
        cheapest: Solution | None = None
        for memory, solution in sorted(found.items()):
            if isinstance(solution, str):
                yield MemoryPrice(memory, None, None, solution)
                continue
            if cheapest is not None and cheapest.executed.cost < solution.executed.cost:
                request = replace(self.request, memory=memory, time_limit=seconds)
                solution = self.solver.improved(request, solution, cheapest)
            cheapest = solution
            bound = self.solver.knowledge.bound(solution.case)
            parts = self.session.optimizer.micro_batches
            yield MemoryPrice(memory, solution.plan, None if bound is None else bound.value * parts / NANOSECONDS)

    def _pin_of(self, target: str, decision: str | Sequence[str], forbids: bool) -> Pin:
        return pin_of(target, decision, self.session.mesh, forbids)

    def _planned_with(self, pins: tuple[Pin, ...]) -> Plan:
        return self._solve(pins, self.request.time_limit).plan

    def _replanned(self, pins: tuple[Pin, ...], time_limit: float | None) -> tuple[Plan, Plan, float]:
        before = self.solution
        started = time.perf_counter()
        seconds = max(LEAST_REPLAN_SECONDS, REPLAN_SHARE * self.first_seconds) if time_limit is None else time_limit
        after = self._solve(pins, seconds, quick=time_limit is None)
        elapsed = time.perf_counter() - started
        cheaper = after.executed.cost < before.executed.cost and before.case.contains(after.case)
        if cheaper and before.case != after.case:
            before = self.solver.improved(self.request, before, after)
        return before.plan, after.plan, elapsed

    def _solve(self, pins: tuple[Pin, ...], seconds: float, quick: bool = False) -> Solution:
        started = time.perf_counter()
        request = replace(self.request, time_limit=seconds)
        with gc_paused():
            solution = self.solver.solve(request, frozenset(pins), self.progress, quick=quick)
        if not self.first_seconds:
            gc.collect()  # what tracing left behind: else a full collection falls into the plan after the first pin
            self.first_seconds = sum(self.session.times.values()) + time.perf_counter() - started
        return solution

    def close(self) -> None:
        """End the solver processes."""
        self._end()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        reference, mesh = self.session.reference, "x".join(map(str, self.session.mesh))
        where = f"{reference.source} on {mesh} of {self.session.cluster.name}"
        plan = "not planned yet" if self._known is None else repr(self._known.plan)
        return f"<exploration of {where}, {len(self.pins)} pins: {plan}>"
