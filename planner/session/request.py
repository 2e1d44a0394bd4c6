"""Request of one plan of a session."""

from __future__ import annotations

from dataclasses import dataclass

from formulations.kiwi.of_step import MEMORY_MODELS, PROGRAMS, MemoryModel
from formulations.solvers import DEFAULT_SOLVER
from planner.common.plan_error import PlanError
from planner.layers.plan.choices import chosen
from planner.session.formulations import OFFLOAD


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Request of one plan of a session: limits, formulation, solver.

    Parameters
    ----------
    memory
        Bytes of one device, the cluster's reserve included; None for all memory of the cluster's device.
    formulation, solver
        Names.
    time_limit
        Seconds for the solver.
    seed
        Seed of the solver.
    workers
        Processes at work at once; with 1 a solve that ends before its limit is deterministic. One per core if None.
    host_memory
        Bytes of pinned host memory for one device, for formulations that offload; no limit if None.
    gap
        Gap, as a share of the cost, at which the search may end before the time limit; 0 asks for a proof.
    overlap
        Whether gathers of parameters and reductions of gradients may run beside the computation, and share collectives.
    memory_model
        How KIWI's programs count bytes while they search (:data:`formulations.kiwi.of_step.MEMORY_MODELS`); as the
        engine if None.

    Raises
    ------
    PlanError
        The host memory is negative, the gap is not from 0 to below 1, or the formulation has no such memory model.
    """

    memory: int | None = None
    formulation: str = "kiwi_chain"
    solver: str = DEFAULT_SOLVER
    time_limit: float = 30.0
    seed: int = 0
    workers: int | None = None
    host_memory: int | None = None
    gap: float = 0.0
    overlap: bool = False
    memory_model: str | None = None

    @property
    def counts(self) -> MemoryModel | None:
        """Memory model of a program of KIWI; None for other formulations, which count as the engine."""
        if self.formulation not in PROGRAMS:
            return None
        return next(name for name in MEMORY_MODELS if self.memory_model in (None, name))

    def __post_init__(self) -> None:
        chosen(self.formulation, {"memory_model": self.memory_model})
        if self.overlap and self.formulation in (OFFLOAD, *PROGRAMS):
            raise PlanError(
                f"{self.formulation} does not overlap collectives yet: choose another formulation, or no overlap"
            )
        if not 0.0 <= self.gap < 1.0:
            raise PlanError(f"gap {self.gap}: give a share of the cost from 0 (a proof) to below 1, as 0.001")
        if self.host_memory is not None and self.host_memory < 0:
            raise PlanError(f"host memory {self.host_memory} bytes: give 0 or more, or None for no limit")
