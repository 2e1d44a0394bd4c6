"""Functions for notebooks and the command line: plan, explore, sweep, explain, compare, load, save."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Literal, Required, TypedDict, Unpack, overload

from formulations.problem.solution import Progress
from formulations.solvers import DEFAULT_SOLVER
from planner.common.infeasibility import InfeasibleError
from planner.common.plan_error import PlanError
from planner.explanation import Explanation, explain_plan
from planner.explore.candidates import BestMesh, LargestBatch
from planner.explore.candidates import best_mesh as search_meshes
from planner.explore.candidates import largest_batch as search_batches
from planner.explore.changes import ClusterChange
from planner.explore.comparison import Comparison
from planner.explore.errors import ExploreError
from planner.explore.exploration import Exploration
from planner.explore.grid import Grid
from planner.explore.sweeping import Sweep, SweepRow, run_sweep
from planner.fits import FitsReport, fits_report
from planner.layer_planning import LAYER_FORMULATIONS, plan_layers
from planner.layers.plan.choices import chosen
from planner.layers.plan.document import LayerPlan, is_layer_plan, load_layer_plan, save_layer_plan
from planner.machine.cluster import ClusterSpec
from planner.models.references import ModelReference
from planner.plan.document import Plan, load_plan, save_plan
from planner.session import PUBLISHED, PlanningSession, PlanRequest, session_of

__all__ = [
    "ClusterChange",
    "Comparison",
    "Exploration",
    "ExploreError",
    "InfeasibleError",
    "ModelReference",
    "PlanRequest",
    "PlanningSession",
    "Sweep",
    "SweepRow",
    "best_mesh",
    "compare",
    "explain",
    "explore",
    "fits",
    "largest_batch",
    "load",
    "plan",
    "save",
    "sweep",
]


Mesh = tuple[int, ...]
LayerFormulation = Literal["osdp", "galvatron", "h3t", "capture"]
AnyPlan = Plan | LayerPlan
"""A plan of operators or of layers: both have a ``summary`` and are saved and loaded alike."""


class _PlanOptions(TypedDict, total=False):
    """Keywords of :func:`plan` beside the formulation."""

    cluster: Required[ClusterSpec | str]
    mesh: Required[Mesh]
    memory: int | None
    host_memory: int | None
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
    memory: int | None = None,
    host_memory: int | None = None,
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
        Bytes of one device, the cluster's reserve included; None for all that the device has.
    host_memory
        Bytes of pinned host memory for one device, for formulations that offload; None for no limit.
    optimizer
        A name of :data:`planner.graph.optimizers.OPTIMIZERS`; AdamW, in 32 bits for parameters of 16, if None.
    grad_accum
        Micro-batches that the batch of a plan of operators is cut into; their gradients are summed on each device.
    formulation
        One of :data:`planner.session.formulations.FORMULATIONS`, or one of
        :data:`planner.layer_planning.LAYER_FORMULATIONS` for a plan of layers.
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
        Whether a paper's own search plans the layers, in place of the exact one.
    search_batch
        Whether a plan of layers decides the batch too.
    choices
        Choices of the problem of a plan of layers that are not the paper's: values by name
        (:data:`planner.layers.plan.choices.CHOICES`).
    slips
        Slips that a paper's own search keeps: ``prose``, ``printed``, ``repaired``, or names; ``prose`` if None.
    pins, forbidden
        What the plan has to decide, and what it must not: targets and decisions, as for
        :meth:`planner.explore.exploration.Exploration.pin`, and of layers :func:`planner.layers.plan.pins.layer_pin`.
    progress
        Called with every better incumbent or bound, for plans of operators.

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
    if formulation in LAYER_FORMULATIONS:
        if overlap:
            raise PlanError(f"overlap: {formulation} plans layers; it is for formulations of operators")
        if grad_accum != 1:
            raise PlanError(f"grad_accum {grad_accum}: {formulation} plans layers, and their micro-batches with them")
        chosen(formulation, choices or {})
        return plan_layers(
            reference,
            cluster=cluster,
            devices=prod(mesh),
            formulation=formulation,
            memory=memory,
            optimizer=optimizer,
            as_published=as_published,
            search_batch=search_batch,
            time_limit=time_limit,
            slips=slips,
            pins=pins,
            forbidden=forbidden,
            choices=choices,
        )
    if search_batch:
        raise PlanError(f"search_batch: {formulation} plans operators; it is for {', '.join(LAYER_FORMULATIONS)}")
    _check_published(formulation, as_published, choices, slips)
    formulation = PUBLISHED[formulation] if as_published else formulation
    whole = _reference(reference)
    if grad_accum < 1 or whole.batch % grad_accum:
        raise PlanError(f"grad_accum {grad_accum}: a batch of {whole.batch} cannot be cut into as many micro-batches")
    micro = replace(whole, batch=whole.batch // grad_accum)
    session = PlanningSession(micro, cluster, mesh, optimizer, grad_accum=grad_accum)
    request = PlanRequest(memory, formulation, solver, time_limit, seed, workers, host_memory, gap, overlap)
    if not (pins or forbidden):
        return session.plan(request, progress)
    with Exploration(session, request, progress) as exploration:
        return exploration.first_with(pins, forbidden)


def _check_published(
    formulation: str, as_published: bool, choices: Mapping[str, str | None] | None, slips: str | None
) -> None:
    """Refuse what is for plans of layers, and a published form where a formulation has none."""
    if as_published and formulation not in PUBLISHED:
        known = ", ".join((*PUBLISHED, *LAYER_FORMULATIONS))
        raise PlanError(f"as_published: {formulation} has no published form of its own; it is for {known}")
    chosen(formulation, choices or {})
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
    memory: int | None = None,
    optimizer: str | None = None,
) -> FitsReport:
    """Bounds on the memory that one rank needs, without solving; parameters as for :func:`plan`."""
    session = PlanningSession(_reference(reference), cluster, mesh, optimizer)
    return fits_report(session.graph, prod(mesh), session.optimizer, session.budget(memory).tensor_bytes)


def _reference(given: ModelReference | str) -> ModelReference:
    return ModelReference(given) if isinstance(given, str) else given


def explore(
    reference: ModelReference | str,
    *,
    cluster: ClusterSpec | str,
    mesh: Mesh,
    memory: int | None = None,
    optimizer: str | None = None,
    request: PlanRequest | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Exploration:
    """Prepare a step to be planned, changed and planned again.

    Parameters
    ----------
    reference, cluster, mesh, memory, optimizer, progress
        As for :func:`plan`.
    request
        Everything else of a plan; the default request if None.

    Returns
    -------
    Exploration
        With ``plan``, ``pin``, ``forbid``, ``unpin``, ``whatif`` and ``price_of_memory``.
    """
    session = PlanningSession(_reference(reference), cluster, mesh, optimizer)
    return Exploration(session, _within(request, memory), progress)


def best_mesh(
    reference: ModelReference | str,
    ranks: int,
    *,
    cluster: ClusterSpec | str,
    memory: int | None = None,
    optimizer: str | None = None,
    request: PlanRequest | None = None,
    axes: int = 2,
    progress: Callable[[Progress], None] | None = None,
) -> BestMesh:
    """Find the mesh of so many ranks whose plan is fastest.

    Parameters
    ----------
    reference, cluster, memory, optimizer, progress
        As for :func:`plan`.
    ranks
        Product of the sizes of the mesh axes.
    request
        As for :func:`explore`, for each mesh that is planned.
    axes
        Mesh axes at most.

    Returns
    -------
    BestMesh
        Of each mesh its plan, or the bound by which it was pruned.

    Raises
    ------
    InfeasibleError
        No mesh has a plan.
    """
    return search_meshes(_reference(reference), cluster, ranks, _within(request, memory), optimizer, axes, progress)


def largest_batch(
    reference: ModelReference | str,
    *,
    cluster: ClusterSpec | str,
    mesh: Mesh,
    memory: int | None = None,
    optimizer: str | None = None,
    request: PlanRequest | None = None,
    multiple: int | None = None,
    most: int = 2**16,
    progress: Callable[[Progress], None] | None = None,
) -> LargestBatch:
    """Find the largest batch that a plan fits into the memory: doubled while one fits, then halved in between.

    Parameters
    ----------
    reference, cluster, mesh, memory, optimizer, progress
        As for :func:`plan`; the batch of the reference does not count.
    request
        As for :func:`explore`.
    multiple
        Batches are multiples of it; of the ranks of the mesh if None.
    most
        The largest batch that is tried.

    Returns
    -------
    LargestBatch
        Of each batch its plan, or why it does not fit.

    Raises
    ------
    InfeasibleError
        Not even the smallest batch fits.
    """

    def floor(session: PlanningSession) -> int:
        return fits_report(session.graph, prod(mesh), session.optimizer).rows[-1].peak_bytes

    found = _within(request, memory)
    return search_batches(_reference(reference), cluster, mesh, found, floor, optimizer, multiple, most, progress)


def sweep(
    reference: ModelReference | str,
    *,
    cluster: ClusterSpec | str,
    meshes: Sequence[Mesh],
    memories: Sequence[int | None] = (None,),
    batches: Sequence[int] = (),
    formulations: Sequence[str] = ("kiwi_chain",),
    solvers: Sequence[str] = (DEFAULT_SOLVER,),
    optimizer: str | None = None,
    request: PlanRequest | None = None,
    executor: Executor | None = None,
    folder: str | Path | None = None,
    keep_plans: bool = False,
    on_row: Callable[[SweepRow], None] | None = None,
) -> Sweep:
    """Plan a step for all combinations of meshes, limits, batches, formulations and solvers.

    Rows are kept on disk by the content that they depend on. So a sweep that was interrupted goes on where it ended,
    and one with more values plans only what is new.

    Parameters
    ----------
    reference, cluster, optimizer
        As for :func:`plan`.
    meshes, memories, batches, formulations, solvers
        Values; a memory of None is all of the device, no batches are that of the reference.
    request
        Time limit, seed, workers and gap of every plan.
    executor
        Any executor of :mod:`concurrent.futures`, also that of a Dask client; one new process if None, which in a
        script needs ``if __name__ == "__main__":`` around the call.
    folder
        Where rows are kept; ``sweeps`` in the folder of measured files if None.
    keep_plans
        Whether plans are written to the folder as well.
    on_row
        Called with each row as it comes.

    Returns
    -------
    Sweep
        A row per combination: a plan's figures, or the reason why there is none.
    """
    found = _reference(reference)
    grid = Grid(found, cluster, meshes, memories, batches, formulations, solvers, optimizer, request or PlanRequest())
    return run_sweep(found.source, list(grid), executor, folder, keep_plans, on_row)


def _within(request: PlanRequest | None, memory: int | None) -> PlanRequest:
    found = request or PlanRequest()
    return found if memory is None else replace(found, memory=memory)


def explain(
    plan: AnyPlan,
    *,
    cluster: ClusterSpec | str | None = None,
    time_limit: float = 20.0,
    progress: Callable[[Progress], None] | None = None,
    allow_code: bool = False,
) -> Explanation | str:
    """Explain a plan: its costs, recomputation and memory; of a plan of layers, its settings.

    Parameters
    ----------
    plan
        The plan.
    cluster
        The cluster where it is not known by name.
    time_limit
        Seconds for each of the two solves that price memory.
    progress
        As for :func:`plan`.
    allow_code
        Whether a plan from elsewhere may import the module that it names.

    Raises
    ------
    ModelError
        The plan's model is code that was not allowed.
    """
    if isinstance(plan, LayerPlan):
        return plan.summary()
    return explain_plan(session_of(plan, cluster, allow_code), plan, time_limit, progress)


def compare(**plans: AnyPlan) -> Comparison:
    """Put plans of either kind side by side, by the names given to them."""
    return Comparison(tuple(plans), tuple(plans.values()))
