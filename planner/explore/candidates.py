"""Searches over meshes and batches, in which bounds save plans.

A mesh is pruned where a lower bound on all of its plans is no less than the cost of a plan on another one: first the
sum of the cheapest layouts of all operators, then the bound of the problem without a memory limit. A batch is pruned
where the bytes that some operator needs with everything sharded are more than there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from formulations.problem.solution import KnownBound, Progress, SolveOptions
from formulations.problem.time_limit import noticing_interrupts
from formulations.solvers import SolverPool, solve
from formulations.step.solving.context import Candidate
from formulations.step.solving.registry import sharding_problem
from planner.common.infeasibility import InfeasibleError
from planner.common.units import format_bytes, format_seconds
from planner.explore.errors import ExploreError
from planner.explore.tables import AnyPlan, Table, seconds_of
from planner.explore.warm import QUICK, WarmSolver
from planner.layers.plan.document import LayerPlan
from planner.layers.planning import LAYER_FORMULATIONS, plan_layers
from planner.machine.cluster import ClusterError, ClusterSpec, load_cluster
from planner.machine.memory_budget import MemoryBudget
from planner.models.references import ModelReference
from planner.plan.decision import NANOSECONDS
from planner.plan.document import Plan
from planner.session.planning import PlanningSession
from planner.session.request import PlanRequest
from planner.strategies.traced_step import TracedStep

PRUNE_SHARE = 0.3
"""Part of the time limit of a plan for the bound that may save it."""

FEASIBLE_GAP = 0.9
"""Gap at which the search for any plan of a batch ends."""


SHOWN = 100
"""Characters of a reason that a table shows."""


_NOT_ALL = "interrupted: not all were tried"


@dataclass(frozen=True, slots=True)
class Tried:
    """One mesh or batch of a search.

    Parameters
    ----------
    name
        The mesh or the batch.
    verdict
        ``planned``, ``pruned``, ``no plan`` or, after Ctrl-C, ``not tried``.
    plan
        Its plan.
    bound_seconds
        Below what no plan of it takes.
    reason
        By which bound it was pruned, or why there is no plan.
    """

    name: str
    verdict: str
    plan: AnyPlan | None = None
    bound_seconds: float | None = None
    reason: str = ""

    def row(self) -> dict[str, Any]:
        """The figures."""
        return {
            "candidate": self.name,
            "verdict": self.verdict,
            "seconds": None if self.plan is None else self.plan.objective_seconds,
            "bound_seconds": self.bound_seconds,
            "peak_bytes": None if self.plan is None else self.plan.peak_bytes,
            "reason": self.reason if len(self.reason) <= SHOWN else f"{self.reason[: SHOWN - 3]}...",
        }


@dataclass(frozen=True, repr=False)
class BestMesh(Table):
    """The best mesh of so many ranks.

    Parameters
    ----------
    ranks
        How many.
    mesh, plan
        The best one, and its plan.
    tried
        Every mesh, in the order in which they were looked at.
    """

    ranks: int
    mesh: tuple[int, ...]
    plan: AnyPlan
    tried: tuple[Tried, ...]

    def title(self) -> str:
        """The best mesh and its time."""
        seconds = format_seconds(seconds_of(self.plan))
        return f"{self.ranks} ranks: {'x'.join(map(str, self.mesh))} is best, {seconds} a step"

    def rows(self) -> list[dict[str, Any]]:
        """A row per mesh."""
        return [tried.row() for tried in self.tried]

    def notes(self) -> Sequence[str]:
        """Whether the search was ended before it had tried all meshes."""
        return [_NOT_ALL] if any(tried.verdict == "not tried" for tried in self.tried) else []


@dataclass(frozen=True, repr=False)
class LargestBatch(Table):
    """The largest batch that fits.

    Parameters
    ----------
    batch, plan
        The batch and its plan.
    limit_bytes
        Bytes of one device, the reserve included.
    tried
        Every batch that was looked at.
    interrupted
        Whether Ctrl-C ended the search, so that a larger batch may fit.
    """

    batch: int
    plan: AnyPlan
    limit_bytes: int
    tried: tuple[Tried, ...]
    interrupted: bool = False

    def title(self) -> str:
        """The batch and its time."""
        seconds = format_seconds(seconds_of(self.plan))
        return f"batch {self.batch} fits into {format_bytes(self.limit_bytes)}, {seconds} a step"

    def rows(self) -> list[dict[str, Any]]:
        """A row per batch."""
        return [tried.row() for tried in self.tried]

    def notes(self) -> Sequence[str]:
        """What the search takes for granted."""
        if self.interrupted:
            return [_NOT_ALL]
        if all(tried.verdict == "planned" for tried in self.tried):
            return ["every batch fits that was to be tried: ask for a larger one with most"]
        return ["larger batches than the smallest that did not fit were not tried"]


def meshes_of(ranks: int, axes: int = 2) -> list[tuple[int, ...]]:
    """All meshes of so many ranks with at most so many axes, each of two ranks or more; ``(1,)`` for one rank."""
    if ranks < 1 or axes < 1:
        raise ExploreError(f"{ranks} ranks on {axes} axes: give at least one of each")
    return [(1,)] if ranks == 1 else sorted(_factorizations(ranks, axes), key=lambda mesh: (len(mesh), mesh))


def _factorizations(ranks: int, axes: int) -> Iterator[tuple[int, ...]]:
    yield (ranks,)
    if axes > 1:
        for first in range(2, ranks // 2 + 1):
            if ranks % first == 0:
                for rest in _factorizations(ranks // first, axes - 1):
                    yield (first, *rest)


def best_mesh(
    reference: ModelReference,
    cluster: ClusterSpec | str,
    ranks: int,
    request: PlanRequest,
    optimizer: str | None = None,
    axes: int = 2,
    progress: Callable[[Progress], None] | None = None,
) -> BestMesh:
    """Find the mesh of so many ranks whose plan is fastest; see :func:`planner.api.best_mesh`."""
    spec = load_cluster(cluster) if isinstance(cluster, str) else cluster
    if request.formulation in LAYER_FORMULATIONS:  # which share devices by stages, data and products themselves
        made = planned_layers(reference, spec, (ranks,), request, optimizer, progress)
        return BestMesh(ranks, (ranks,), made, (Tried(str(ranks), "planned", made, made.bound_seconds),))
    tried: list[Tried] = []
    sessions: list[PlanningSession] = []
    traced: TracedStep | None = None
    for mesh in meshes_of(ranks, axes):
        try:
            session = PlanningSession(reference, spec, mesh, optimizer, traced=traced)
        except ClusterError as error:
            tried.append(Tried(_name(mesh), "no plan", reason=str(error)))
            continue
        traced = session.traced
        sessions.append(session)
    best: tuple[PlanningSession, Plan] | None = None
    with SolverPool() as pool, noticing_interrupts() as noticed:
        for session in sorted(sessions, key=_cheapest_layouts):
            name, pruned = _name(session.mesh), None
            if noticed.is_set():
                tried.append(Tried(name, "not tried", reason=_NOT_ALL))
                continue
            if best is not None:
                pruned = _pruned(session, best[1].decision.predicted.objective_ns, request, pool, progress)
            if pruned is not None:
                tried.append(pruned)
                continue
            try:
                plan = WarmSolver(session, pool).solve(request, progress=progress).plan
            except InfeasibleError as error:
                tried.append(Tried(name, "no plan", reason=f"{'interrupted: ' * noticed.is_set()}{error}"))
                continue
            except KeyboardInterrupt:
                noticed.set()
                tried.append(Tried(name, "not tried", reason=_NOT_ALL))
                continue
            tried.append(Tried(name, "planned", plan, plan.bound_seconds))
            if best is None or plan.objective_seconds < best[1].objective_seconds:
                best = session, plan
    if best is None and noticed.is_set():
        raise KeyboardInterrupt
    if best is None:
        reasons = "; ".join(f"{entry.name}: {entry.reason}" for entry in tried)
        raise InfeasibleError(f"{ranks} ranks: no mesh has a plan ({reasons})")
    return BestMesh(ranks, best[0].mesh, best[1], tuple(tried))


def _name(mesh: tuple[int, ...]) -> str:
    return "x".join(map(str, mesh))


def _cheapest_layouts(session: PlanningSession) -> int:
    """Cost that no plan is below: every operator and update at its cheapest layout, nothing resharded (quanta)."""
    nodes = session.space.model.nodes
    return sum(int((node.cost + (0 if node.update_cost is None else node.update_cost)).min()) for node in nodes)


def _pruned(
    session: PlanningSession,
    cost: int,
    request: PlanRequest,
    pool: SolverPool,
    progress: Callable[[Progress], None] | None,
) -> Tried | None:
    """The mesh as pruned, where a bound is no less than the cost (quanta) of a plan on another mesh."""
    name, floor = _name(session.mesh), _cheapest_layouts(session)
    if floor >= cost:
        return Tried(name, "pruned", None, floor / NANOSECONDS, "by the cheapest layouts of its operators")
    built = sharding_problem(session.space.model, None)
    options = SolveOptions(PRUNE_SHARE * request.time_limit, request.seed, workers=request.workers)
    found = solve(built.problem, QUICK, options, progress, pool)
    bound: KnownBound | None = found.known_bound
    if bound is not None and bound.value >= cost:
        return Tried(name, "pruned", None, bound.value / NANOSECONDS, "by the bound without a memory limit")
    if found.choices is not None:  # the plan that follows begins from it
        decision = built.decode(found.choices)
        session.free.learn(Candidate(decision, session.execute(decision)), bound)
    return None


def largest_batch(
    reference: ModelReference,
    cluster: ClusterSpec | str,
    mesh: tuple[int, ...],
    request: PlanRequest,
    floor: Callable[[PlanningSession], int],
    optimizer: str | None = None,
    multiple: int | None = None,
    most: int = 2**16,
    progress: Callable[[Progress], None] | None = None,
) -> LargestBatch:
    """Find the largest batch with a plan; see :func:`planner.api.largest_batch`.

    ``floor`` returns bytes of tensors that every plan of a session's step needs on a device.
    """
    step = prod(mesh) if multiple is None else multiple
    if step < 1 or most < step:
        raise ExploreError(
            f"batches in multiples of {step} up to {most}: give a multiple of 1 or more, and at most that"
        )
    tried: list[Tried] = []
    found: dict[int, PlanningSession] = {}
    of_layers = request.formulation in LAYER_FORMULATIONS
    with SolverPool() as pool, noticing_interrupts() as noticed:

        def fits(count: int) -> bool:
            larger = replace(reference, batch=count * step)
            if of_layers:
                tried.append(_try_layers(larger, cluster, mesh, request, optimizer, progress))
            else:
                found[count] = session = PlanningSession(larger, cluster, mesh, optimizer)
                tried.append(_try_batch(session, request, floor(session), pool, progress))
            return tried[-1].plan is not None

        low, high = 0, 1
        try:
            while high * step <= most and not noticed.is_set() and fits(high):
                low, high = high, 2 * high
            high = min(high, most // step + 1)
            while high - low > 1 and not noticed.is_set():
                middle = (low + high) // 2
                low, high = (middle, high) if fits(middle) else (low, middle)
        except KeyboardInterrupt:
            noticed.set()
        if not low and noticed.is_set():
            raise KeyboardInterrupt
        if not low:
            raise InfeasibleError(f"batch {step}: not even that fits: {tried[0].reason}")
        plan = next(entry.plan for entry in tried if entry.name == str(low * step))
        assert plan is not None
        if not (of_layers or noticed.is_set()):
            with suppress(InfeasibleError):  # the time limit ended before this search found any plan
                better = WarmSolver(found[low], pool).solve(request, progress=progress).plan
                plan = min(plan, better, key=seconds_of)
        chosen = next(k for k, entry in enumerate(tried) if entry.name == str(low * step))
        tried[chosen] = replace(tried[chosen], plan=plan, bound_seconds=plan.bound_seconds)
    spec = load_cluster(cluster) if isinstance(cluster, str) else cluster
    return LargestBatch(
        low * step, plan, MemoryBudget.on(spec, request.memory).device_bytes, tuple(tried), noticed.is_set()
    )


def planned_layers(
    reference: ModelReference,
    cluster: ClusterSpec | str,
    mesh: tuple[int, ...],
    request: PlanRequest,
    optimizer: str | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> LayerPlan:
    """The plan of layers of a request, on as many devices as a mesh has; errors as for :func:`plan_layers`."""
    return plan_layers(
        reference,
        cluster=cluster,
        devices=prod(mesh),
        formulation=request.formulation,
        memory=request.memory,
        optimizer=optimizer,
        time_limit=request.time_limit,
        progress=progress,
    )


def _try_layers(
    reference: ModelReference,
    cluster: ClusterSpec | str,
    mesh: tuple[int, ...],
    request: PlanRequest,
    optimizer: str | None,
    progress: Callable[[Progress], None] | None,
) -> Tried:
    try:
        plan = planned_layers(reference, cluster, mesh, request, optimizer, progress)
    except InfeasibleError as error:
        return Tried(str(reference.batch), "no plan", reason=str(error))
    return Tried(str(reference.batch), "planned", plan, plan.bound_seconds)


def _try_batch(
    session: PlanningSession,
    request: PlanRequest,
    floor: int,
    pool: SolverPool,
    progress: Callable[[Progress], None] | None,
) -> Tried:
    name, limit = str(session.reference.batch), session.budget(request.memory).tensor_bytes
    if floor > limit:
        return Tried(name, "pruned", reason=f"every plan holds {format_bytes(floor)} of tensors at some operator")
    try:
        solution = WarmSolver(session, pool).solve(
            replace(request, gap=max(request.gap, FEASIBLE_GAP)), progress=progress, second=False
        )
    except InfeasibleError as error:
        return Tried(name, "no plan", reason=str(error))
    return Tried(name, "planned", solution.plan, solution.plan.bound_seconds)
