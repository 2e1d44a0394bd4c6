"""Training steps on meshes for benchmarks, prepared once: peak of the plan without a limit, and smallest peak.

Limits are shares of the peak of the fastest sharded plan without a limit. The presets' devices have less memory than
some of these plans need, so the devices of a case have :data:`DEVICE_BYTES`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import lru_cache

from formulations.problem.solution import SolveOptions, Status
from formulations.solvers import SolverPool
from formulations.step.solving.context import Candidate, Executed, FreeDecision
from formulations.step.training_step import StepDecision
from planner.machine.cluster import ClusterSpec, load_cluster
from planner.models.references import ModelReference
from planner.papers.kiwi.dynamic_memory import UncountedGradients
from planner.session import PlanningSession, PlanRequest

DEVICE_BYTES = 2**40
"""Memory of every device of a case: 1 TiB, which all these steps fit into without a limit."""

FREE_SECONDS = 30.0
"""Longest search for the best plan without a limit."""


@dataclass(frozen=True, slots=True)
class StepCase:
    """A training step on a mesh.

    Parameters
    ----------
    label
        Prefix of the names of its instances.
    reference
        Which step.
    cluster
        Name or file; the devices get :data:`DEVICE_BYTES`.
    mesh
        Size of each mesh axis.
    optimizer
        As for :class:`planner.session.PlanningSession`.
    slowdown
        Divides the bandwidth of the links between devices; latencies stay.
    counts_gradients
        Whether gradients take memory; see :mod:`planner.papers.kiwi.dynamic_memory`.
    """

    label: str
    reference: ModelReference
    cluster: str
    mesh: tuple[int, ...]
    optimizer: str = "adamw"
    slowdown: int = 1
    counts_gradients: bool = True

    @property
    def name(self) -> str:
        """Label, mesh and memory of the devices."""
        return f"{self.label}-{'x'.join(map(str, self.mesh))}-of-1TiB"

    def without_gradients(self) -> StepCase:
        """The same with gradients that take no memory."""
        return replace(self, counts_gradients=False)

    def spec(self) -> ClusterSpec:
        """The cluster with ample devices and slowed links."""
        cluster = load_cluster(self.cluster)
        changes: dict[str, object] = {"device": cluster.device.model_copy(update={"memory_bytes": DEVICE_BYTES})}
        for name in ("intra_node", "inter_node"):
            link = getattr(cluster, name)
            if link is not None:
                changes[name] = link.model_copy(update={"bandwidth": link.bandwidth / self.slowdown})
        return cluster.model_copy(update=changes)

    def session(self) -> PlanningSession:
        """A new session."""
        kind = PlanningSession if self.counts_gradients else UncountedGradients
        return kind(self.reference, self.spec(), self.mesh, self.optimizer)


@dataclass(frozen=True, slots=True)
class SmallestPeak:
    """The smallest peak found for a formulation.

    Parameters
    ----------
    decision
        The decision with this peak, None if none was found.
    peak
        Bytes that it holds at most when it is executed.
    bound
        Bytes that every decision of the formulation needs; None where its problem leaves decisions out.
    """

    decision: StepDecision | None
    peak: int | None
    bound: int | None


@dataclass(slots=True)
class PreparedCase:
    """A session and its results so far.

    Parameters
    ----------
    session
        Its session.
    free
        Cost (ns) and peak (bytes) of the fastest sharded plan without a limit.
    static_bytes
        Bytes of that plan before the first operator on one device: parameters, optimizer state, inputs.
    smallest
        By formulation, as far as known.
    planned
        The decision found last by formulation and limit in bytes; None where a search found none.
    """

    session: PlanningSession
    free: Executed
    static_bytes: int
    smallest: dict[str, SmallestPeak] = field(default_factory=dict)
    planned: dict[tuple[str, int], Candidate | None] = field(default_factory=dict)

    def limit(self, share: int, of_dynamic: bool) -> int:
        """Bytes for tensors: so many per cent of the peak, or of what it has above the static bytes.

        The latter is right only where gradients are not counted (``StepCase.counts_gradients``).
        """
        static = self.static_bytes if of_dynamic else 0
        return static + (self.free.peak - static) * share // 100

    def peak(self, decision: StepDecision) -> int:
        """Bytes that a decision holds at most on one device, by executing it."""
        return self.session.execute(decision).peak

    def request(self, formulation: str, limit: int | None, solver: str, options: SolveOptions) -> PlanRequest:
        """A request with a limit in bytes for tensors, None for all that the devices have."""
        memory = None if limit is None else limit + self.session.costs.device.reserve_bytes
        return PlanRequest(memory, formulation, solver, options.time_limit, options.seed)


@lru_cache(maxsize=1)
def prepared(case: StepCase) -> PreparedCase:
    """Prepare a case; the last one stays prepared, as the instances of one case follow each other."""
    session = case.session()
    with SolverPool() as pool:
        solved = session.solve(PlanRequest(formulation="sharding", time_limit=FREE_SECONDS), pool=pool)
    free = Candidate(solved.decision, session.execute(solved.decision))
    if solved.result.status is Status.OPTIMAL:  # no device is full, so it is the best without a limit as well
        session.free = FreeDecision(free, solved.result.known_bound)
    profile = session.replay(session.schedule(solved.decision)).profile
    return PreparedCase(session, free.executed, sum(profile.at_start.values()))
