"""An exploration: one step, its present plan, and what changes to it cost."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from formulations.problem.solution import Progress
from formulations.solvers import SolverPool
from planner.common.infeasibility import InfeasibleError
from planner.explore.changes import ClusterChange, WhatIf, recosted, translated
from planner.explore.errors import ExploreError
from planner.explore.known import Solution
from planner.explore.memory_prices import SHARES, MemoryPrice, MemoryPrices
from planner.explore.pins import pin_of
from planner.explore.tables import Table, plan_row, signed_bytes, signed_seconds
from planner.explore.targets import module_paths
from planner.explore.warm import WarmSolver
from planner.plan.decision import NANOSECONDS, Pin
from planner.plan.document import Plan
from planner.session.planning import PlanningSession
from planner.session.request import PlanRequest

REPLAN_SHARE = 0.1
"""Part of the time of the first plan that the search for a plan with other pins has."""

LEAST_REPLAN_SECONDS = 0.5
"""Time that such a search has at least."""


@dataclass(frozen=True, repr=False)
class PinChange(Table):
    """What a change of the pins costs.

    Parameters
    ----------
    changed
        The pins that were added or taken away.
    pins
        The pins after the change.
    before, after
        The plans before and after the change.
    elapsed_seconds
        Time of the plan after it.
    first_seconds
        Time of the first plan of the exploration, loading and tracing included.
    """

    changed: tuple[Pin, ...]
    pins: tuple[Pin, ...]
    before: Plan
    after: Plan
    elapsed_seconds: float
    first_seconds: float

    @property
    def seconds(self) -> float:
        """Seconds that a step takes longer than before."""
        return self.after.objective_seconds - self.before.objective_seconds

    @property
    def least_seconds(self) -> float | None:
        """What is proven of the change between the two optima: at least this; None where a bound is missing."""
        bound = self.after.bound_seconds
        return None if bound is None else bound - self.before.objective_seconds

    @property
    def most_seconds(self) -> float | None:
        """What is proven of the change between the two optima: at most this; None where a bound is missing."""
        bound = self.before.bound_seconds
        return None if bound is None else self.after.objective_seconds - bound

    @property
    def bytes(self) -> int:
        """Bytes by which the peak of a device is higher than before."""
        return self.after.peak_bytes - self.before.peak_bytes

    def title(self) -> str:
        """What changed, and what it costs."""
        what = ", ".join(str(pin) if pin in self.pins else f"no longer {pin}" for pin in self.changed) or "nothing"
        return f"{what}: {signed_seconds(self.seconds)} a step, peak {signed_bytes(self.bytes)}"

    def rows(self) -> list[dict[str, Any]]:
        """The plans before and after."""
        return [plan_row("before", self.before), plan_row("after", self.after)]

    def notes(self) -> Sequence[str]:
        """What is proven of the cost, and how long the plan took."""
        lines = []
        if self.least_seconds is not None and self.most_seconds is not None:
            least, most = signed_seconds(self.least_seconds), signed_seconds(self.most_seconds)
            lines.append(f"between the optima: from {least} to {most} a step, proven")
        share = self.elapsed_seconds / self.first_seconds if self.first_seconds else 0.0
        lines.append(f"planned in {self.elapsed_seconds:.2f} s, {share:.0%} of the time of the first plan")
        return lines


class Exploration:
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
        self.session = session
        self.request = request or PlanRequest()
        if self.request.overlap:
            raise ExploreError("overlap: pins and prices are for plans without it; explore those, then plan with it")
        self.progress = progress
        self.pins: tuple[Pin, ...] = ()
        """Decisions of the user that the present plan keeps, in the order in which they came."""
        self.history: list[PinChange] = []
        """Changes of pins so far."""
        self.first_seconds = 0.0
        """Time of the first plan, loading and tracing included; 0 before it."""
        own = SolverPool() if pool is None else None
        self._end = weakref.finalize(self, (lambda: None) if own is None else own.close)
        self.solver = WarmSolver(session, pool or own or SolverPool())

    @property
    def plan(self) -> Plan:
        """The present plan; solved when it is first asked for.

        Raises
        ------
        InfeasibleError
            No plan fits; the message names a limit that would be enough.
        """
        return self.solution.plan

    @property
    def solution(self) -> Solution:
        """The present plan with its decision."""
        return self._solve(self.pins, self.request.time_limit)

    @property
    def modules(self) -> tuple[str, ...]:
        """Paths of the modules that can be pinned."""
        return module_paths(self.session.space)

    @property
    def operators(self) -> tuple[str, ...]:
        """Identities of the operators that can be pinned, in the order of execution."""
        return tuple(operator.identity for operator in self.session.graph.operators if not operator.is_view)

    def pin(self, target: str, decision: str | Sequence[str], time_limit: float | None = None) -> PinChange:
        """Make the plan decide something, and plan again.

        Parameters
        ----------
        target
            An operator, a module (all of its forward operators), a parameter, or a pattern such as ``*.mlp``.
        decision
            ``keep``, ``recompute`` or ``offload`` the outputs, or a placement with an entry per mesh axis (``S0``,
            ``R``, ``Psum``; ``*`` for any), of an operator's first output. Of a module, ``recompute`` and ``offload``
            are for the outputs that backward reads.
        time_limit
            Seconds for the search; a tenth of the time of the first plan if None.

        Returns
        -------
        PinChange
            What it costs.

        Raises
        ------
        ExploreError
            Nothing has the name, or nothing is left to an operator. The pins stay as they were.
        InfeasibleError
            No plan within the limit keeps the pin. The pins stay as they were.
        """
        return self._change((*self.pins, pin_of(target, decision, self.session.mesh)), time_limit)

    def forbid(self, target: str, decision: str | Sequence[str], time_limit: float | None = None) -> PinChange:
        """Keep the plan from deciding something, and plan again; parameters and errors as for :meth:`pin`."""
        return self._change((*self.pins, pin_of(target, decision, self.session.mesh, True)), time_limit)

    def first_with(self, pins: Sequence[tuple[str, str]] = (), forbidden: Sequence[tuple[str, str]] = ()) -> Plan:
        """Make the first plan with pins, in the time limit of the request; none without them is made before.

        Parameters
        ----------
        pins, forbidden
            Targets and decisions, as for :meth:`pin` and :meth:`forbid`.

        Raises
        ------
        ExploreError, InfeasibleError
            As for :meth:`pin`.
        """
        mesh = self.session.mesh
        wanted = tuple(pin_of(target, decision, mesh) for target, decision in pins)
        unwanted = tuple(pin_of(target, decision, mesh, True) for target, decision in forbidden)
        found = tuple(dict.fromkeys((*wanted, *unwanted)))
        plan = self._solve(found, self.request.time_limit).plan
        self.pins = found
        return plan

    def unpin(self, target: str | None = None, time_limit: float | None = None) -> PinChange:
        """Take pins back, and plan again.

        Parameters
        ----------
        target
            The target of the pins as it was given; None for all pins.
        time_limit
            As for :meth:`pin`; a plan that was made before is taken as it is.

        Raises
        ------
        ExploreError
            There is no such pin.
        """
        left = tuple(pin for pin in self.pins if target is not None and pin.target != target)
        if target is not None and len(left) == len(self.pins):
            known = ", ".join(repr(pin.target) for pin in self.pins) or "none"
            raise ExploreError(f"{target!r} is not pinned; pinned are: {known}")
        return self._change(left, time_limit)

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

    def price_of_memory(self, limits: Sequence[int] | None = None, time_limit: float | None = None) -> MemoryPrices:
        """What memory is worth around the present limit, under the present pins.

        Parameters
        ----------
        limits
            Bytes of one device, the reserve included; some around what the present plan needs if None.
        time_limit
            Seconds for the search at each limit; that of the request if None.

        Raises
        ------
        ExploreError
            There are no limits.
        InfeasibleError
            There is no plan within the present limit.
        """
        reserve, most = self.session.cluster.device.reserve_bytes, self.session.cluster.device.memory_bytes
        present = self.solution
        now = min(present.case.tensor_bytes, present.plan.peak_bytes)
        if limits is None:
            limits = [min(most, int(share * now) + reserve) for share in SHARES]
        if not limits:
            raise ExploreError("limits: give at least one, in bytes of a device")
        seconds = self.request.time_limit if time_limit is None else time_limit
        found: dict[int, Solution | str] = {}
        for memory in sorted(set(limits), reverse=True):
            request = replace(self.request, memory=memory, time_limit=seconds)
            try:
                found[memory] = self.solver.solve(request, frozenset(self.pins), self.progress)
            except InfeasibleError as error:
                found[memory] = str(error)
        prices: list[MemoryPrice] = []
        cheapest: Solution | None = None
        for memory, solution in sorted(found.items()):
            if isinstance(solution, str):
                prices.append(MemoryPrice(memory, None, None, solution))
                continue
            if cheapest is not None and cheapest.executed.cost < solution.executed.cost:
                request = replace(self.request, memory=memory, time_limit=seconds)
                solution = self.solver.improved(request, solution, cheapest)
            cheapest = solution
            bound = self.solver.knowledge.bound(solution.case)
            prices.append(MemoryPrice(memory, solution.plan, None if bound is None else bound.value / NANOSECONDS))
        return MemoryPrices(tuple(prices), now + reserve)

    def _change(self, pins: tuple[Pin, ...], time_limit: float | None) -> PinChange:
        pins = tuple(dict.fromkeys(pins))
        before = self.solution
        started = time.perf_counter()
        seconds = max(LEAST_REPLAN_SECONDS, REPLAN_SHARE * self.first_seconds) if time_limit is None else time_limit
        after = self._solve(pins, seconds, quick=time_limit is None)
        elapsed = time.perf_counter() - started
        if after.executed.cost < before.executed.cost and before.case.contains(after.case):
            before = self.solver.improved(self.request, before, after)
        changed = tuple(pin for pin in (*self.pins, *pins) if (pin in self.pins) != (pin in pins))
        self.pins = pins
        change = PinChange(changed, pins, before.plan, after.plan, elapsed, self.first_seconds)
        self.history.append(change)
        return change

    def _solve(self, pins: tuple[Pin, ...], seconds: float, quick: bool = False) -> Solution:
        started = time.perf_counter()
        request = replace(self.request, time_limit=seconds)
        solution = self.solver.solve(request, frozenset(pins), self.progress, quick=quick)
        if not self.first_seconds:
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
        known = self.solver.knowledge.of(self.solver.case(self.request, frozenset(self.pins)))
        plan = "not planned yet" if known is None else repr(known.plan)
        return f"<exploration of {where}, {len(self.pins)} pins: {plan}>"
