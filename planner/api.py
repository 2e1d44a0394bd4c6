"""Functions for notebooks and the command line: plan, explore, sweep, explain, compare, load, save."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Required, TypedDict, Unpack, overload

from formulations.problem.solution import Progress
from formulations.solvers import DEFAULT_SOLVER
from planner.common.infeasibility import InfeasibleError
from planner.explained_layers import explain_layers
from planner.explanation import Explanation, explain_plan
from planner.explore.candidates import BestMesh, LargestBatch
from planner.explore.candidates import best_mesh as search_meshes
from planner.explore.candidates import largest_batch as search_batches
from planner.explore.changes import ClusterChange
from planner.explore.comparison import Comparison
from planner.explore.errors import ExploreError
from planner.explore.exploration import Exploration
from planner.explore.grid import Grid
from planner.explore.layers import LayerExploration, LayerQuestion
from planner.explore.sweeping import OnCell, Sweep, SweepRow, run_sweep
from planner.explore.tables import AnyPlan
from planner.fits import fits_report
from planner.layers.plan.document import LayerPlan
from planner.layers.planning import LAYER_FORMULATIONS
from planner.machine.cluster import ClusterSpec, load_cluster
from planner.models.references import ModelReference, check_code
from planner.planning import (
    LayerFormulation,
    Memory,
    Mesh,
    as_reference,
    bytes_of,
    check_published,
    fits,
    load,
    micro_batched,
    plan,
    refuse_micro_batches,
    save,
)
from planner.session import PlanningSession, PlanRequest, session_of

__all__ = [
    "AnyPlan",
    "ClusterChange",
    "Comparison",
    "Exploration",
    "ExploreError",
    "InfeasibleError",
    "LayerExploration",
    "ModelReference",
    "PlanRequest",
    "PlanningSession",
    "Sweep",
    "SweepRow",
    "best_mesh",
    "compare",
    "explain",
    "explore",
    "explore_plan",
    "fits",
    "largest_batch",
    "load",
    "plan",
    "save",
    "sweep",
]


class _ExploreOptions(TypedDict, total=False):
    """Keywords of :func:`explore` beside the formulation."""

    cluster: Required[ClusterSpec | str]
    mesh: Required[Mesh]
    memory: Memory | None
    optimizer: str | None
    time_limit: float | None
    grad_accum: int
    request: PlanRequest | None
    as_published: bool
    choices: Mapping[str, str | None] | None
    slips: str | None
    progress: Callable[[Progress], None] | None


@overload
def explore(  # type: ignore[overload-overlap]  # names of formulations of layers are strings too
    reference: ModelReference | str, *, formulation: LayerFormulation, **options: Unpack[_ExploreOptions]
) -> LayerExploration: ...
@overload
def explore(
    reference: ModelReference | str, *, formulation: str | None = ..., **options: Unpack[_ExploreOptions]
) -> Exploration: ...
def explore(
    reference: ModelReference | str,
    *,
    cluster: ClusterSpec | str,
    mesh: Mesh,
    memory: Memory | None = None,
    optimizer: str | None = None,
    grad_accum: int = 1,
    formulation: str | None = None,
    time_limit: float | None = None,
    request: PlanRequest | None = None,
    as_published: bool = False,
    choices: Mapping[str, str | None] | None = None,
    slips: str | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> Exploration | LayerExploration:
    """Prepare a step to be planned, changed and planned again.

    Parameters
    ----------
    reference, cluster, mesh, memory, optimizer, grad_accum, formulation, time_limit, progress
        As for :func:`plan`; formulation and time limit are those of the request if None.
    request
        Everything else of a plan; the default request if None. Of plans of layers its time limit counts.
    as_published, choices, slips
        Of plans of layers, as for :func:`plan`.

    Returns
    -------
    Exploration or LayerExploration
        With ``plan``, ``pin``, ``forbid``, ``unpin``, ``whatif`` and ``price_of_memory``.
    """
    asked = _within(request, memory)
    if formulation is not None:
        asked = replace(asked, formulation=formulation)
    if time_limit is not None:
        asked = replace(asked, time_limit=time_limit)
    if asked.formulation not in LAYER_FORMULATIONS:
        check_published(asked.formulation, as_published, choices, slips)
        session = micro_batched(as_reference(reference), cluster, mesh, optimizer, grad_accum)
        return Exploration(session, asked, progress)
    refuse_micro_batches(asked.formulation, grad_accum)
    question = LayerQuestion(
        as_reference(reference),
        load_cluster(cluster) if isinstance(cluster, str) else cluster,
        prod(mesh),
        asked.formulation,
        optimizer,
        asked.time_limit,
        as_published,
        slips,
        choices or {},
    )
    return LayerExploration(question, asked.memory, progress)


def explore_plan(
    plan: AnyPlan | Path | str,
    *,
    cluster: ClusterSpec | str | None = None,
    request: PlanRequest | None = None,
    allow_code: bool = False,
    progress: Callable[[Progress], None] | None = None,
) -> Exploration | LayerExploration:
    """Go on from a finished plan, such as one that was loaded: it is checked and not solved again.

    Parameters
    ----------
    plan
        The plan, or its file. Its step, mesh, limits, formulation and pins are those of the exploration.
    cluster
        The cluster where it is not known by the name in the plan.
    request
        Solver, time limit, workers and gap of every other plan; the default request if None.
    allow_code
        Whether a plan from elsewhere may import the module that it names.
    progress
        As for :func:`explore`.

    Returns
    -------
    Exploration or LayerExploration
        As of :func:`explore`.

    Raises
    ------
    ExploreError
        The plan overlaps communication, or was written by hand.
    ValueError
        The plan does not hold, or its model is code that was not allowed.
    """
    asked = request or PlanRequest()
    if isinstance(plan, (str, Path)):
        plan = load(plan)
    if isinstance(plan, LayerPlan):
        check_code(plan.model.source, allow_code)
        return LayerExploration.of_plan(plan, cluster, asked.time_limit, progress)
    return Exploration.of_plan(plan, session_of(plan, cluster, allow_code), asked, progress)


def best_mesh(
    reference: ModelReference | str,
    ranks: int,
    *,
    cluster: ClusterSpec | str,
    memory: Memory | None = None,
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
    return search_meshes(as_reference(reference), cluster, ranks, _within(request, memory), optimizer, axes, progress)


def largest_batch(
    reference: ModelReference | str,
    *,
    cluster: ClusterSpec | str,
    mesh: Mesh,
    memory: Memory | None = None,
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
    return search_batches(as_reference(reference), cluster, mesh, found, floor, optimizer, multiple, most, progress)


def sweep(
    reference: ModelReference | str,
    *,
    cluster: ClusterSpec | str,
    meshes: Sequence[Mesh],
    memories: Sequence[Memory | None] = (None,),
    batches: Sequence[int] = (),
    formulations: Sequence[str] = ("kiwi_chain",),
    solvers: Sequence[str] = (DEFAULT_SOLVER,),
    optimizer: str | None = None,
    request: PlanRequest | None = None,
    executor: Executor | None = None,
    folder: str | Path | None = None,
    keep_plans: bool = False,
    on_row: Callable[[SweepRow], None] | None = None,
    on_cell: OnCell | None = None,
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
    on_cell
        Called with each cell whose plan begins, for progress inside a row; as for
        :func:`planner.explore.sweeping.sweep_rows`.

    Returns
    -------
    Sweep
        A row per combination: a plan's figures, or the reason why there is none; notes on options that some
        formulations do not use.

    Raises
    ------
    ExploreError
        No formulation uses an option that is given.
    """
    found = as_reference(reference)
    limits = [bytes_of(memory, "memories") for memory in memories]
    grid = Grid(found, cluster, meshes, limits, batches, formulations, solvers, optimizer, request or PlanRequest())
    made = run_sweep(found.source, list(grid), executor, folder, keep_plans, on_row, on_cell)
    return replace(made, remarks=grid.notes())


def _within(request: PlanRequest | None, memory: Memory | None) -> PlanRequest:
    found = request or PlanRequest()
    return found if memory is None else replace(found, memory=bytes_of(memory, "memory"))


def explain(
    plan: AnyPlan,
    *,
    cluster: ClusterSpec | str | None = None,
    time_limit: float = 20.0,
    progress: Callable[[Progress], None] | None = None,
    allow_code: bool = False,
) -> Explanation:
    """Explain a plan: its costs, recomputation and memory; of a plan of layers, its settings too.

    Parameters
    ----------
    plan
        The plan; of one of layers that was written by hand, the settings alone are known.
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
        return explain_layers(plan, cluster, time_limit, allow_code, progress)
    return explain_plan(session_of(plan, cluster, allow_code), plan, time_limit, progress)


def compare(**plans: AnyPlan) -> Comparison:
    """Put plans of either kind side by side, by the names given to them."""
    return Comparison(tuple(plans), tuple(plans.values()))
