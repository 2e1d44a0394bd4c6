"""The commands around a plan: ``plan``, ``fits``, ``sweep`` and ``explain``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.common.units import format_bytes, format_gap, format_limit, format_seconds
from runtime.commands.options import (
    DEFAULT_SOLVER,
    FORMULATIONS,
    LAYER_FORMULATIONS,
    AllowCode,
    AsPublished,
    Batch,
    Cluster,
    Degrees,
    Forbidden,
    Gap,
    GradAccum,
    HostMemory,
    JsonFile,
    Machine,
    MemoryModel,
    Mesh,
    MicroBatches,
    Model,
    Objective,
    OptimizerRuns,
    OtherCluster,
    Overlap,
    Pins,
    PlanFile,
    SearchBatch,
    Searching,
    Slips,
    Step,
    Strategies,
    TimeLimit,
    Workers,
)
from runtime.commands.tables.plan import plan_document
from runtime.commands.tables.progress import ProgressLine, progress_line
from runtime.commands.values import (
    OptionError,
    device_memory,
    json_path,
    parse_bytes,
    parse_mesh,
    parse_pins,
    readable_file,
    table_document,
    writable_file,
    write_json,
)

if TYPE_CHECKING:
    from planner.api import AnyPlan
    from planner.explore.grid import Cell
    from planner.fits import FitsReport

NANOSECOND = 1e-9


def plan(
    context: typer.Context,
    model: Model,
    mesh: Mesh,
    out: Annotated[Path, typer.Option(help="Plan file to write.", show_default=False)],
    machine: Machine,
    step: Step,
    searching: Searching,
    batch: Batch = 8,
    grad_accum: GradAccum = 1,
    overlap: Overlap = False,
    as_published: AsPublished = False,
    slips: Slips = None,
    objective: Objective = None,
    memory_model: MemoryModel = None,
    strategies: Strategies = None,
    micro_batches: MicroBatches = None,
    degrees: Degrees = None,
    optimizer_runs: OptimizerRuns = None,
    search_batch: SearchBatch = False,
    pin: Pins = None,
    forbid: Forbidden = None,
    json_file: JsonFile = None,
) -> None:
    """Plan the training step of MODEL and write the plan."""
    ranks, limit, host_limit = parse_mesh(mesh, "--mesh"), machine.limit(), searching.host_limit()
    pins, forbidden = parse_pins(pin, "--pin"), parse_pins(forbid, "--forbid")
    writable_file(out, "--out")
    if batch % grad_accum:
        raise OptionError(f"--grad-accum {grad_accum}: it does not divide --batch {batch}; change either")

    reference, formulation = step.reference(model, batch), searching.model_formulation
    if search_batch and not searching.of_layers:
        raise OptionError(f"--search-batch: {formulation} plans operators; it is for {', '.join(LAYER_FORMULATIONS)}")
    if grad_accum != 1 and searching.of_layers:
        raise OptionError(f"--grad-accum: {formulation} plans layers, and their micro-batches with them; leave it out")
    if overlap and searching.of_layers:
        raise OptionError(f"--overlap: {formulation} plans layers; it is for formulations of operators")
    searching.check(context)

    choices = {
        "objective": objective,
        "memory_model": memory_model,
        "strategies": strategies,
        "micro_batches": micro_batches,
        "degrees": degrees,
        "optimizer_runs": optimizer_runs,
    }
    from planner import api

    with progress_line(f"planning {model}" + (" by layers" if searching.of_layers else ""), NANOSECOND) as report:
        made: api.AnyPlan = api.plan(
            reference,
            cluster=machine.cluster,
            mesh=ranks,
            memory=limit,
            host_memory=host_limit,
            optimizer=step.optimizer,
            grad_accum=grad_accum,
            formulation=formulation,
            solver=searching.solver,
            time_limit=searching.time_limit,
            seed=step.seed,
            workers=searching.workers,
            gap=searching.gap,
            overlap=overlap,
            as_published=as_published,
            search_batch=search_batch,
            choices=choices,
            slips=slips,
            pins=pins,
            forbidden=forbidden,
            progress=report,
        )
        note = _cannot_run(made)
    api.save(made, out)
    typer.echo(made.summary())
    if note:
        typer.echo(note)
    typer.echo(f"wrote {out}")
    write_json(json_file, plan_document(made, out))


def fits(model: Model, mesh: Mesh, machine: Machine, step: Step, batch: Batch = 8, json_file: JsonFile = None) -> None:
    """Bound the memory that one rank needs, without planning, and compare it with the limit."""
    ranks, limit = parse_mesh(mesh, "--mesh"), machine.limit()

    from planner import api

    reference = step.reference(model, batch)
    with progress_line(f"tracing {model}"):
        report = api.fits(reference, cluster=machine.cluster, mesh=ranks, memory=limit, optimizer=step.optimizer)
    print_fits(report)
    write_json(json_file, report)


def print_fits(report: FitsReport) -> None:
    """Print the rows of a report as a table."""
    from rich.console import Console
    from rich.table import Table

    limit = "no limit" if report.limit is None else format_limit(report.limit, report.reserve)
    table = Table(title=f"{report.parameter_count:,} parameters, {report.ranks} ranks, {limit}", title_justify="left")
    for heading in ("one rank holds", "figure", "bytes", ""):
        table.add_column(heading, justify="right" if heading == "bytes" else "left")
    for row in report.rows:
        verdict = {None: "", True: "fits", False: "does not fit"}[row.fits]
        table.add_row(row.name, row.kind, format_bytes(row.peak_bytes), verdict)
    Console().print(table)


def sweep(
    model: Model,
    mesh: Annotated[
        list[str], typer.Option(metavar="2x2", help="Ranks along each mesh axis; may be repeated.", show_default=False)
    ],
    json_file: Annotated[
        Path,
        typer.Option(
            "--out",
            "--json",
            metavar="FILE",
            help="File of the table, as JSON; - is standard output, and texts then go to standard error.",
            show_default=False,
        ),
    ],
    step: Step,
    cluster: Cluster = "local-cpu",
    memory: Annotated[
        list[str] | None,
        typer.Option(metavar="4GiB", help="Memory of one device; may be repeated.", show_default="all of the device"),
    ] = None,
    tensor_memory: Annotated[
        list[str] | None,
        typer.Option(
            metavar="4GiB",
            help="In place of --memory: what torch's tensors may hold, beyond the reserve; may be repeated.",
            show_default=False,
        ),
    ] = None,
    host_memory: HostMemory = None,
    batch: Annotated[list[int] | None, typer.Option(help="Sequences in one step; may be repeated.")] = None,
    model_formulation: Annotated[
        list[str] | None,
        typer.Option(
            "--model-formulation",
            help=f"{' | '.join(FORMULATIONS + LAYER_FORMULATIONS)}; may be repeated.",
            show_default="kiwi_chain",
        ),
    ] = None,
    solver: Annotated[
        list[str] | None, typer.Option(help="Name of a solver; may be repeated.", show_default=DEFAULT_SOLVER)
    ] = None,
    workers: Workers = None,
    time_limit: TimeLimit = 10.0,
    gap: Gap = 0.0,
    overlap: Overlap = False,
    folder: Annotated[
        Path | None, typer.Option(help="Folder of the rows; those that are there are not planned again.")
    ] = None,
    keep_plans: Annotated[bool, typer.Option("--keep-plans", help="Write the plans to the folder too.")] = False,
) -> None:
    """Plan MODEL for all combinations of the values; after Ctrl-C the same command goes on where it ended."""
    meshes = [parse_mesh(text, "--mesh") for text in mesh]
    if memory and tensor_memory:
        raise OptionError(f"--tensor-memory: {tensor_memory[0]} beside --memory {memory[0]}; give one of them")
    limits = [device_memory(text, None, cluster) for text in memory or ()]
    limits += [device_memory(None, text, cluster) for text in tensor_memory or ()]
    host_limit = None if host_memory is None else parse_bytes(host_memory, "--host-memory")

    from planner import api

    def show(row: api.SweepRow) -> None:
        found = row.reason or f"{format_seconds(row.seconds or 0.0)} a step, gap {format_gap(row.gap)}"
        typer.echo(f"{_cell_name(row.batch, row.mesh, row.memory_bytes, row.formulation, row.solver)}: {found}")

    with (
        _rows_are_kept(folder),
        progress_line(f"sweeping {model}", NANOSECOND) as report,
    ):

        def begin(cell: Cell) -> ProgressLine:
            asked, shape = cell.request, "x".join(map(str, cell.mesh))
            name = _cell_name(cell.reference.batch, shape, asked.memory, asked.formulation, asked.solver)
            report.begin(name, named=True)
            return report

        found = api.sweep(
            step.reference(model, (batch or [8])[0]),
            cluster=cluster,
            meshes=meshes,
            memories=limits or [None],
            batches=batch or (),
            formulations=model_formulation or ["kiwi_chain"],
            solvers=solver or [DEFAULT_SOLVER],
            optimizer=step.optimizer,
            request=api.PlanRequest(
                time_limit=time_limit,
                seed=step.seed,
                workers=workers,
                host_memory=host_limit,
                gap=gap,
                overlap=overlap,
            ),
            folder=folder,
            keep_plans=keep_plans,
            on_row=show,
            on_cell=begin,
        )
    write_json(json_file, table_document(found))
    typer.echo("\n".join([found.title(), *found.notes()]))
    if json_path(json_file) is not None:
        typer.echo(f"wrote {json_file}")


def _cell_name(batch: int, mesh: str, memory: int | None, formulation: str, solver: str) -> str:
    """A cell of a sweep in words."""
    limit = "all memory" if memory is None else format_bytes(memory)
    return f"batch {batch}, mesh {mesh}, {limit}, {formulation}, {solver}"


@contextmanager
def _rows_are_kept(folder: Path | None) -> Iterator[None]:
    """Say after Ctrl-C where the rows of a sweep are, and how it goes on."""
    try:
        yield
    except KeyboardInterrupt:
        place = "the folder of measured files" if folder is None else str(folder)
        typer.echo(f"the rows so far are kept in {place}: the same command goes on from them", err=True)
        raise


def explain(
    plan_file: PlanFile,
    cluster: OtherCluster = None,
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds for each solve that prices memory.")] = 20.0,
    allow_code: AllowCode = False,
    json_file: JsonFile = None,
) -> None:
    """Explain a plan: its largest costs, its recomputation, and the tensors alive at the peak."""
    readable_file(plan_file, "PLAN")

    from planner import api

    plan = api.load(plan_file)
    with progress_line(f"explaining {plan_file.name}", NANOSECOND) as report:
        explanation = api.explain(plan, cluster=cluster, time_limit=time_limit, progress=report, allow_code=allow_code)
    typer.echo(str(explanation))
    write_json(json_file, explanation)


def _cannot_run(plan: AnyPlan) -> str:
    """Reason why a plan of layers cannot be run here, as a note; empty where it can."""
    from planner.layers.plan.document import LayerPlan
    from runtime.layers.check import refusal

    reason = refusal(plan) if isinstance(plan, LayerPlan) else None
    return "" if reason is None else f"note: this plan cannot be run here: {reason}"
