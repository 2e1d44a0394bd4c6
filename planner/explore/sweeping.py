"""Sweeps: plans over a grid, by any executor, row by row, kept on disk so that an interrupted sweep goes on.

A row is kept under the digest of all that it depends on (:class:`planner.explore.grid.Cell`) as soon as it is there.
Cells of one step are planned one after another in a process, which traces the step once and plans each limit from what
is known of the others.
"""

from __future__ import annotations

import json
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from formulations.problem.files import write_text_atomically
from formulations.problem.solution import Progress
from formulations.problem.time_limit import noticing_interrupts
from formulations.solvers import SolverPool
from planner.common.infeasibility import InfeasibleError
from planner.common.model_error import ModelError
from planner.common.plan_error import PlanError
from planner.explore.candidates import planned_layers
from planner.explore.errors import ExploreError
from planner.explore.grid import Cell, row_of_cell
from planner.explore.tables import AnyPlan, Table
from planner.explore.warm import WarmSolver
from planner.layers.plan.document import LayerPlan, save_layer_plan
from planner.machine.cluster import ClusterError
from planner.machine.identity import cache_directory
from planner.plan.document import Plan, save_plan
from planner.plan.notes import costs_in
from planner.session.planning import PlanningSession

OnCell = Callable[[Cell], Callable[[Progress], None]]
"""Takes a cell whose plan begins, and returns what takes the progress of its search."""

NO_PLAN = (InfeasibleError, ClusterError, PlanError, ModelError)
"""Errors that a row reports, where others end the sweep."""


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One row of a sweep.

    Parameters
    ----------
    batch, mesh, memory_bytes, formulation, solver
        The cell; ``memory_bytes`` is None for all of a device.
    status
        Of the plan, or ``no_plan``.
    seconds, bound_seconds, gap, peak_bytes, recomputed, collectives
        Of the plan; None without one.
    costs
        How the costs of the step are known: steps of costs that were measured and of modelled ones do not compare.
    planning_seconds
        Time of the plan: tracing counts for the first cell of a step.
    digest
        Digest of the plan's decision; of a plan of layers, of all but its record.
    reason
        Why there is no plan.
    plan_file
        File of the plan, where plans are kept.
    """

    batch: int
    mesh: str
    memory_bytes: int | None
    formulation: str
    solver: str
    status: str
    seconds: float | None = None
    bound_seconds: float | None = None
    gap: float | None = None
    peak_bytes: int | None = None
    recomputed: int | None = None
    collectives: int | None = None
    costs: str = ""
    planning_seconds: float = 0.0
    digest: str = ""
    reason: str = ""
    plan_file: str = ""


@dataclass(frozen=True, repr=False)
class Sweep(Table):
    """Rows of a sweep in the order of its grid, how many of them were known before, and remarks on some."""

    name: str
    sweep_rows: tuple[SweepRow, ...]
    known: int = 0
    remarks: tuple[str, ...] = ()

    def title(self) -> str:
        """The model, and how many rows there are."""
        planned = sum(row.seconds is not None for row in self.sweep_rows)
        return f"{self.name}: {len(self.sweep_rows)} cells, {planned} with a plan, {self.known} known before"

    def rows(self) -> list[dict[str, Any]]:
        """All rows; long texts are in the attributes."""
        return [
            {name: value for name, value in asdict(row).items() if name not in ("digest", "plan_file", "reason")}
            for row in self.sweep_rows
        ]

    def notes(self) -> Sequence[str]:
        """What holds of all rows of some formulations."""
        return self.remarks

    def best(self) -> SweepRow | None:
        """The row whose step is fastest per sequence of the batch; None where nothing has a plan."""
        planned = [row for row in self.sweep_rows if row.seconds is not None]
        return min(planned, key=lambda row: (row.seconds or 0.0) / row.batch, default=None)


def sweep_rows(
    cells: Iterable[Cell],
    executor: Executor | None = None,
    folder: str | Path | None = None,
    keep_plans: bool = False,
    on_cell: OnCell | None = None,
) -> Iterator[tuple[int, SweepRow, bool]]:
    """Plan cells, and yield each row when it is there.

    Parameters
    ----------
    cells
        What to plan.
    executor
        Any executor of :mod:`concurrent.futures`, such as that of a Dask client; one process if None.
    folder
        Where rows are kept; ``sweeps`` in the folder of measured files if None. Other machines of the executor do not
        need it.
    keep_plans
        Whether plans are written to the folder too.
    on_cell
        Called with each cell whose plan begins; what it returns is called with every better incumbent or bound. It
        needs an executor of threads of this process; without an executor the cells are planned in this thread then.

    Yields
    ------
    tuple
        Position of the cell, its row, and whether it was known before.

    Raises
    ------
    ExploreError
        A row cannot be written, or an executor of other processes should report what it does.
    """
    if on_cell is not None and not isinstance(executor, ThreadPoolExecutor | None):
        raise ExploreError(
            "on_cell: it needs an executor of threads, ThreadPoolExecutor(1); rows of others come by on_row"
        )
    place = cache_directory() / "sweeps" if folder is None else Path(folder)
    todo: list[tuple[int, Cell, Path]] = []
    for position, cell in enumerate(cells):
        file = place / f"{cell.digest()}.json"
        row = _read_row(file)
        if row is None or (keep_plans and row.seconds is not None and not Path(row.plan_file or "-").is_file()):
            todo.append((position, cell, file))
        else:
            yield position, row, True
    if not todo:
        return
    if executor is None and on_cell is not None:
        yield from _one_by_one(todo, keep_plans, on_cell)
        return
    with ExitStack() as stack:
        if executor is None:
            context = multiprocessing.get_context("spawn")
            executor = stack.enter_context(ProcessPoolExecutor(1, context))
        running: dict[Future[SweepRow], tuple[int, Path]] = {}
        try:
            for position, cell, file in todo:
                running[executor.submit(plan_cell, cell, _plan_file(file, keep_plans), on_cell)] = position, file
            for future in as_completed(running):
                position, file = running[future]
                row = future.result()
                _write_row(file, row)
                yield position, row, False
        finally:  # after Ctrl-C nothing more begins; what has begun ends by its own time limit
            for future in running:
                future.cancel()


def _one_by_one(
    todo: Iterable[tuple[int, Cell, Path]], keep_plans: bool, on_cell: OnCell
) -> Iterator[tuple[int, SweepRow, bool]]:
    """Plan in this thread. Ctrl-C ends the search of a row at once, and the sweep; that row is not kept."""
    for position, cell, file in todo:
        with noticing_interrupts() as noticed:
            row = plan_cell(cell, _plan_file(file, keep_plans), on_cell)
        if noticed.is_set():
            raise KeyboardInterrupt
        _write_row(file, row)
        yield position, row, False


def _plan_file(file: Path, keep_plans: bool) -> str:
    return str(file.with_suffix(".plan.json").absolute()) if keep_plans else ""


def plan_cell(cell: Cell, plan_file: str = "", on_cell: OnCell | None = None) -> SweepRow:
    """Plan one cell; a step that has no plan is a row with the reason."""
    begun = time.perf_counter()
    progress = None if on_cell is None else on_cell(cell)
    plan: AnyPlan
    try:
        if cell.of_layers:
            plan = planned_layers(cell.reference, cell.cluster, cell.mesh, cell.request, cell.optimizer, progress)
        else:
            plan = _plan(cell, progress)
    except NO_PLAN as error:
        spent = time.perf_counter() - begun
        return SweepRow(**row_of_cell(cell), status="no_plan", planning_seconds=spent, reason=str(error))
    common = SweepRow(
        **row_of_cell(cell),
        status="",
        seconds=plan.objective_seconds,
        bound_seconds=plan.bound_seconds,
        gap=plan.gap,
        peak_bytes=plan.peak_bytes,
        planning_seconds=time.perf_counter() - begun,
        plan_file=plan_file,
    )
    if isinstance(plan, LayerPlan):
        if plan_file:
            save_layer_plan(plan, Path(plan_file))
        assert plan.record is not None
        return replace(common, status=plan.record.status, digest=plan.settings_digest())
    if plan_file:
        save_plan(plan, Path(plan_file))
    return replace(
        common,
        status=str(plan.record.certificate.status),
        recomputed=plan.recomputed,
        collectives=plan.collectives,
        costs=costs_in(plan.record.notes),
        digest=plan.digest,
    )


def run_sweep(
    name: str,
    cells: Sequence[Cell],
    executor: Executor | None = None,
    folder: str | Path | None = None,
    keep_plans: bool = False,
    on_row: Callable[[SweepRow], None] | None = None,
    on_cell: OnCell | None = None,
) -> Sweep:
    """Plan all cells; parameters as for :func:`sweep_rows`, ``on_row`` is called with each row as it comes."""
    found: dict[int, SweepRow] = {}
    known = 0
    for position, row, was_known in sweep_rows(cells, executor, folder, keep_plans, on_cell):
        found[position] = row
        known += was_known
        if on_row is not None:
            on_row(row)
    return Sweep(name, tuple(found[position] for position in sorted(found)), known)


_local = threading.local()


def _plan(cell: Cell, progress: Callable[[Progress], None] | None) -> Plan:
    """Plan of a cell, from what is known of the cells before it; each thread keeps the last step and its workers."""
    if getattr(_local, "step", None) != cell.step:
        former: WarmSolver | None = getattr(_local, "solver", None)
        traced = None
        if former is not None and former.session.reference == cell.reference:
            traced = former.session.traced
        session = PlanningSession(cell.reference, cell.cluster, cell.mesh, cell.optimizer, traced=traced)
        _local.solver = WarmSolver(session, SolverPool() if former is None else former.pool)
        _local.step = cell.step
    solver: WarmSolver = _local.solver
    if cell.request.overlap:
        return solver.session.plan(cell.request, progress)
    return solver.solve(cell.request, progress=progress).plan


def _read_row(file: Path) -> SweepRow | None:
    """A kept row; a file that cannot be read counts as none."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if set(content) != set(SweepRow.__dataclass_fields__):
            return None
        return SweepRow(**content)
    except (OSError, ValueError, TypeError):
        return None


def _write_row(file: Path, row: SweepRow) -> None:
    try:
        write_text_atomically(file, json.dumps(asdict(row), indent=1, allow_nan=False) + "\n")
    except OSError as error:
        raise ExploreError(f"sweep: no row can be written in {file.parent}: {error.strerror or error}") from error
