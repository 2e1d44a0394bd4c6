"""One plan of a step, by operators or by layers; plans written and read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Literal, Required, TypedDict, Unpack, overload

from formulations.problem.solution import Progress
from formulations.solvers import DEFAULT_SOLVER
from planner.common.plan_error import PlanError
from planner.common.units import bytes_in
from planner.explore.exploration import Exploration
from planner.explore.pins import overlapped_plan, pin_of
from planner.explore.tables import AnyPlan
from planner.fits import FitsReport, fits_report
from planner.layers.plan.choices import chosen
from planner.layers.plan.document import LayerPlan, is_layer_plan, load_layer_plan, save_layer_plan
from planner.layers.planning import LAYER_FORMULATIONS, plan_layers
from planner.machine.cluster import ClusterSpec
from planner.models.references import ModelReference
from planner.plan.document import Plan, load_plan, save_plan
from planner.session import PUBLISHED, PlanningSession, PlanRequest

Mesh = tuple[int, ...]
Memory = int | str
"""Bytes, or a text such as ``4GiB``."""
LayerFormulation = Literal["osdp", "galvatron", "h3t", "capture"]


class _PlanOptions(TypedDict, total=False):
    """Keywords of :func:`plan` beside the formulation."""

    cluster: Required[ClusterSpec | str]
    mesh: Required[Mesh]
    memory: Memory | None
    host_memory: Memory | None
    optimizer: str | None
    grad_accum: int
    solver: str
    time_limit: float
    seed: int
    workers: int | None
    gap: float
    overlap: bool
    as_published: bool
    search_batch: bool
    choices: Mapping[str, str | None] | None
    slips: str | None
    pins: Sequence[tuple[str, str]]
    forbidden: Sequence[tuple[str, str]]
    progress: Callable[[Progress], None] | None


@overload
def plan(  # type: ignore[overload-overlap]  # names of formulations of layers are strings too
    reference: ModelReference | str, *, formulation: LayerFormulation, **options: Unpack[_PlanOptions]
) -> LayerPlan: ...
@overload
def plan(reference: ModelReference | str, *, formulation: str = ..., **options: Unpack[_PlanOptions]) -> Plan: ...
def plan(
    reference: ModelReference | str,
    *,
    cluster: ClusterSpec | str,
    mesh: Mesh,
    memory: Memory | None = None,
    host_memory: Memory | None = None,
    optimizer: str | None = None,
    grad_accum: int = 1,
    formulation: str = "kiwi_chain",
    solver: str = DEFAULT_SOLVER,
    time_limit: float = 30.0,
    seed: int = 0,
    workers: int | None = None,
    gap: float = 0.0,
    overlap: bool = False,
    as_published: bool = False,
    search_batch: bool = False,
    choices: Mapping[str, str | None] | None = None,
    slips: str | None = None,
    pins: Sequence[tuple[str, str]] = (),
    forbidden: Sequence[tuple[str, str]] = (),
    progress: Callable[[Progress], None] | None = None,
) -> AnyPlan:
    """Plan one training step, by operators or by layers.

    Parameters
    ----------
    reference
        Which step; a name alone stands for a reference with the defaults of :class:`ModelReference`.
    cluster
        A cluster, or the name or file of one.
    mesh
        Size of each mesh axis; layers are planned for as many devices as it has.
    memory
        Bytes of one device, the cluster's reserve included, or text such as ``4GiB``; None for all that the device has.
    host_memory
        Bytes of pinned host memory for one device, for formulations that offload; None for no limit.
    optimizer
        A name of :data:`planner.graph.optimizers.OPTIMIZERS`; AdamW, in 32 bits for parameters of 16, if None.
    grad_accum
        Micro-batches that the batch of a plan of operators is cut into; their gradients are summed on each device.
    formulation
        One of :data:`planner.session.formulations.FORMULATIONS`, or one of
        :data:`planner.layers.planning.LAYER_FORMULATIONS` for a plan of layers.
    solver
        Name of the solver, for plans of operators.
    time_limit
        Seconds for the solver.
    seed
        Seed of the solver.
    workers
        Processes at work at once; with 1 a solve that ends before its limit is deterministic. One per core if None.
    gap
        Gap, as a share of the cost, at which the search for a plan of operators may end; 0 asks for a proof.
    overlap
        Whether gathers of parameters and reductions of gradients of a plan of operators may run beside its computation,
        and share collectives.
    as_published
        Whether a paper's own search plans the layers, in place of the exact one, or KIWI's own program the operators
        (:data:`planner.session.formulations.PUBLISHED`).
    search_batch
        Whether a plan of layers decides the batch too.
    choices
        Choices of the problem of a plan of layers, or of a program of KIWI, that are not the default: values by name
        (:data:`planner.layers.plan.choices.CHOICES`).
    slips
        Slips that a paper's own search keeps: ``prose``, ``printed``, ``repaired``, or names; ``prose`` if None.
    pins, forbidden
        What the plan has to decide, and what it must not: targets and decisions, as for
        :meth:`planner.explore.exploration.Exploration.pin`, and of layers :func:`planner.layers.plan.pins.layer_pin`.
    progress
        Called with every better incumbent or bound; of plans of layers, by searches that may take long.

    Returns
    -------
    Plan or LayerPlan
        A plan of operators is checked by replay, and its cost is bounded by two methods.

    Raises
    ------
    InfeasibleError
        No plan fits; the message names a limit that would be enough.
    ValueError
        Bad input; the message names it and the remedy.
    """
    limit, host_limit = bytes_of(memory, "memory"), bytes_of(host_memory, "host_memory")
    if formulation in LAYER_FORMULATIONS:
        if overlap:
            raise PlanError(f"overlap: {formulation} plans layers; it is for formulations of operators")
        refuse_micro_batches(formulation, grad_accum)
        for name, given in (
            ("solver", None if solver == DEFAULT_SOLVER else solver),
            ("workers", workers),
            ("gap", gap or None),
            ("host_memory", host_limit),
        ):
            if given is not None:
                raise PlanError(f"{name} {given}: {formulation} plans layers by a search of its own; leave it out")
        chosen(formulation, choices or {})
        return plan_layers(
            reference,
            cluster=cluster,
            devices=prod(mesh),
            formulation=formulation,
            memory=limit,
            optimizer=optimizer,
            as_published=as_published,
            search_batch=search_batch,
            time_limit=time_limit,
            slips=slips,
            pins=pins,
            forbidden=forbidden,
            choices=choices,
            progress=progress,
        )
    if search_batch:
        raise PlanError(f"search_batch: {formulation} plans operators; it is for {', '.join(LAYER_FORMULATIONS)}")
    check_published(formulation, as_published, choices, slips)
    formulation = PUBLISHED[formulation] if as_published else formulation
    memory_model = (choices or {}).get("memory_model")
    for target, decision in (*pins, *forbidden):
        pin_of(target, decision, mesh)  # a decision that there is not is refused before the step is traced
    session = micro_batched(as_reference(reference), cluster, mesh, optimizer, grad_accum)
    request = PlanRequest(limit, formulation, solver, time_limit, seed, workers, host_limit, gap, overlap, memory_model)
    if not (pins or forbidden):
        return session.plan(request, progress)
    if overlap:
        kept = [pin_of(target, decision, mesh) for target, decision in pins]
        left_out = [pin_of(target, decision, mesh, forbids=True) for target, decision in forbidden]
        return overlapped_plan(session, request, [*kept, *left_out], progress)
    with Exploration(session, request, progress) as exploration:
        return exploration.with_pins(pins, forbidden)


def refuse_micro_batches(formulation: str, grad_accum: int) -> None:
    """Refuse micro-batches of the user where a plan of layers has its own."""
    if grad_accum != 1:
        raise PlanError(f"grad_accum {grad_accum}: {formulation} plans layers, and their micro-batches with them")


def micro_batched(
    reference: ModelReference, cluster: ClusterSpec | str, mesh: Mesh, optimizer: str | None, grad_accum: int
) -> PlanningSession:
    """The session of a step whose batch is cut into so many micro-batches; errors as for :func:`plan`."""
    if grad_accum < 1 or reference.batch % grad_accum:
        raise PlanError(
            f"grad_accum {grad_accum}: a batch of {reference.batch} cannot be cut into as many micro-batches"
        )
    micro = replace(reference, batch=reference.batch // grad_accum)
    return PlanningSession(micro, cluster, mesh, optimizer, grad_accum=grad_accum)


def check_published(
    formulation: str, as_published: bool, choices: Mapping[str, str | None] | None, slips: str | None
) -> None:
    """Refuse what is for plans of layers, and a published form where a formulation has none."""
    if as_published and formulation not in PUBLISHED:
        known = ", ".join((*PUBLISHED, *LAYER_FORMULATIONS))
        raise PlanError(f"as_published: {formulation} has no published form of its own; it is for {known}")
    chosen(PUBLISHED[formulation] if as_published else formulation, choices or {})
    if slips is not None:
        raise PlanError(f"slips {slips}: {formulation} has none; they are for {', '.join(LAYER_FORMULATIONS)}")


def save(made: AnyPlan, path: Path | str) -> None:
    """Write a plan of either kind atomically.

    Raises
    ------
    PlanError
        The file cannot be written.
    """
    if isinstance(made, LayerPlan):
        save_layer_plan(made, Path(path))
    else:
        save_plan(made, Path(path))


def bytes_of(memory: Memory | None, name: str) -> int | None:
    """Bytes of a size that may be a text, None where there is none; the error of one that is no size names it.

    Raises
    ------
    ValueError
        As for :func:`planner.common.units.bytes_in`.
    """
    return bytes_in(memory, name) if isinstance(memory, str) else memory


def load(path: Path | str) -> AnyPlan:
    """Read a plan of either kind; nothing that it names is imported.

    Raises
    ------
    PlanError
        The file cannot be read or holds no valid plan.
    """
    file = Path(path)
    return load_layer_plan(file) if is_layer_plan(file) else load_plan(file)


def fits(
    reference: ModelReference | str,
    *,
    cluster: ClusterSpec | str,
    mesh: tuple[int, ...],
    memory: Memory | None = None,
    optimizer: str | None = None,
) -> FitsReport:
    """Bounds on the memory that one rank needs, without solving; parameters as for :func:`plan`."""
    session = PlanningSession(as_reference(reference), cluster, mesh, optimizer)
    budget = session.budget(bytes_of(memory, "memory"))
    return fits_report(session.graph, prod(mesh), session.optimizer, budget.tensor_bytes, budget.reserve_bytes)


def as_reference(given: ModelReference | str) -> ModelReference:
    """A reference; a name alone stands for one with the defaults."""
    return ModelReference(given) if isinstance(given, str) else given
