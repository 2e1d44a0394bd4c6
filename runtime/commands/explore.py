"""The commands that explore a step: ``compare``, ``best-mesh``, ``largest-batch``, ``whatif`` and ``price``."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from runtime.commands.asked import Asked, MeshOfModel, ModelOrPlan
from runtime.commands.options import (
    AllowCode,
    Batch,
    Forbidden,
    GradAccum,
    JsonFile,
    Machine,
    Mesh,
    Model,
    Pins,
    Searching,
    Step,
)
from runtime.commands.tables.plan import plan_document
from runtime.commands.tables.progress import progress_line
from runtime.commands.values import (
    OptionError,
    parse_bytes,
    parse_mesh,
    readable_file,
    table_document,
    writable_file,
    write_json,
)

if TYPE_CHECKING:
    from planner.api import AnyPlan
    from planner.explore.changes import WhatIf
    from planner.explore.pinning import PinChange
    from planner.explore.tables import Table

NANOSECOND = 1e-9

BestFile = Annotated[Path | None, typer.Option("--out", help="Plan file to write: the best one.", show_default=False)]


def compare(
    plan_files: Annotated[list[Path], typer.Argument(metavar="PLAN...", help="Plan files.", show_default=False)],
    json_file: JsonFile = None,
) -> None:
    """Put plans side by side, of operators or of layers: time, bound, peak, and what they do."""
    for path in plan_files:
        readable_file(path, "PLAN")

    # Not by planner.api, which takes seconds to import.
    from planner.explore.comparison import Comparison
    from planner.layers.plan.document import is_layer_plan, load_layer_plan
    from planner.plan.document import load_plan

    count = Counter(path.name for path in plan_files)
    names = tuple(path.name if count[path.name] == 1 else str(path) for path in plan_files)
    plans = tuple(load_layer_plan(path) if is_layer_plan(path) else load_plan(path) for path in plan_files)
    _show(Comparison(names, plans), json_file)


def best_mesh(
    context: typer.Context,
    model: Model,
    ranks: Annotated[int, typer.Option(min=1, help="Ranks of the mesh.", show_default=False)],
    machine: Machine,
    step: Step,
    searching: Searching,
    axes: Annotated[int, typer.Option(min=1, help="Mesh axes at most.")] = 2,
    batch: Batch = 8,
    out: BestFile = None,
    json_file: JsonFile = None,
) -> None:
    """Find the mesh of so many ranks whose plan of MODEL is fastest; bounds prune the others."""
    searching.check(context)
    _check(out)

    from planner import api

    with progress_line(f"planning {model} on meshes of {ranks} ranks", NANOSECOND) as report:
        found = api.best_mesh(
            step.reference(model, batch),
            ranks,
            cluster=machine.cluster,
            optimizer=step.optimizer,
            request=searching.request(machine, step),
            axes=axes,
            progress=report,
        )
    _show(found, json_file, found.plan, out, mesh=list(found.mesh))


def largest_batch(
    context: typer.Context,
    model: Model,
    mesh: Mesh,
    machine: Machine,
    step: Step,
    searching: Searching,
    multiple: Annotated[
        int | None, typer.Option(min=1, help="Batches are multiples of this.", show_default="ranks of the mesh")
    ] = None,
    most: Annotated[int, typer.Option(min=1, help="Largest batch to try.")] = 2**16,
    out: BestFile = None,
    json_file: JsonFile = None,
) -> None:
    """Find the largest batch of MODEL for which a plan fits into the memory."""
    searching.check(context)
    shape = parse_mesh(mesh, "--mesh")
    _check(out)

    from planner import api

    with progress_line(f"planning batches of {model}", NANOSECOND) as report:
        found = api.largest_batch(
            step.reference(model),
            cluster=machine.cluster,
            mesh=shape,
            optimizer=step.optimizer,
            request=searching.request(machine, step),
            multiple=multiple,
            most=most,
            progress=report,
        )
    _show(found, json_file, found.plan, out, batch=found.batch)


def whatif(
    context: typer.Context,
    model: ModelOrPlan,
    machine: Machine,
    step: Step,
    searching: Searching,
    mesh: MeshOfModel = None,
    batch: Batch = 8,
    grad_accum: GradAccum = 1,
    bandwidth: Annotated[
        float, typer.Option(metavar="FACTOR", help="Of the rate of links inside a node: 2 is twice as fast.")
    ] = 1.0,
    inter_node_bandwidth: Annotated[
        float, typer.Option(metavar="FACTOR", help="Of that of links between nodes.")
    ] = 1.0,
    host_bandwidth: Annotated[float, typer.Option(metavar="FACTOR", help="Of that of links to the host.")] = 1.0,
    flops: Annotated[float, typer.Option(metavar="FACTOR", help="Of the rate of matrix products.")] = 1.0,
    memory_bandwidth: Annotated[
        float, typer.Option(metavar="FACTOR", help="Of the rate at which a device reads and writes its memory.")
    ] = 1.0,
    to_memory: Annotated[
        str | None, typer.Option(metavar="4GiB", help="Memory of one device.", show_default="as before")
    ] = None,
    to_mesh: Annotated[
        str | None, typer.Option(metavar="2x2", help="Mesh, with as many axes.", show_default="as before")
    ] = None,
    to_cluster: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="Cluster, to which the factors apply.", show_default="as before"),
    ] = None,
    pin: Pins = None,
    forbid: Forbidden = None,
    unpin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PART", help="Take a pin of the plan file back, by its part; may be repeated.", show_default=False
        ),
    ] = None,
    allow_code: AllowCode = False,
    out: Annotated[
        Path | None, typer.Option(help="Plan file to write: that for the change.", show_default=False)
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Say what becomes of a plan under a change of the cluster, and plan again for the change.

    Pins alone are a change too, and their cost is said; beside a change of the cluster they hold before and after it.
    The plan is that of a file, or one of MODEL that is made first. Plans with --overlap cannot be asked about.
    """
    wanted = None if to_memory is None else parse_bytes(to_memory, "--to-memory")
    other_mesh = None if to_mesh is None else parse_mesh(to_mesh, "--to-mesh")
    asked = Asked(context, model, mesh, machine, step, searching, batch, grad_accum, pin, forbid, allow_code)
    _check(out)

    from planner import api
    from planner.machine.cluster import load_cluster

    change = api.ClusterChange(
        bandwidth,
        inter_node_bandwidth,
        host_bandwidth,
        flops,
        memory_bandwidth,
        wanted,
        other_mesh,
        None if to_cluster is None else load_cluster(to_cluster),
    )
    pins_alone = change == api.ClusterChange()
    if unpin and not (pins_alone and asked.is_plan):
        raise OptionError(f"--unpin {unpin[0]}: pins of a plan file are taken back, without a change of the cluster")
    if pins_alone and not any((*asked.pins, unpin)):
        raise OptionError("whatif: nothing changes; give a change, such as --bandwidth 2, --to-memory 4GiB or --pin")
    found: WhatIf | PinChange
    with asked.explored(pinned=not pins_alone) as exploration:
        if pins_alone:
            found = exploration.pin_all(*asked.pins, time_limit=searching.time_limit, unpinned=unpin or ())
        else:
            found = exploration.whatif(change)
    _show(found, json_file, found.after, out)


def price(
    context: typer.Context,
    model: ModelOrPlan,
    machine: Machine,
    step: Step,
    searching: Searching,
    mesh: MeshOfModel = None,
    batch: Batch = 8,
    grad_accum: GradAccum = 1,
    at: Annotated[
        list[str] | None,
        typer.Option(
            metavar="4GiB",
            help="Memory of one device to price; may be repeated.",
            show_default="some around what the plan needs",
        ),
    ] = None,
    pin: Pins = None,
    forbid: Forbidden = None,
    allow_code: AllowCode = False,
    json_file: JsonFile = None,
) -> None:
    """Plan within several memories, and say what a GiB more saves in a step, by plans and by bounds.

    What is planned is the step of a plan file, with its pins, or that of MODEL. Plans with --overlap cannot be asked
    about.
    """
    limits = [parse_bytes(text, "--at") for text in at or ()]
    asked = Asked(context, model, mesh, machine, step, searching, batch, grad_accum, pin, forbid, allow_code)
    with asked.explored() as exploration:
        found = exploration.price_of_memory(limits or None)
    _show(found, json_file)


def _check(out: Path | None) -> None:
    if out is not None:
        writable_file(out, "--out")


def _show(
    table: Table, json_file: Path | None, plan: AnyPlan | None = None, out: Path | None = None, **figures: Any
) -> None:
    """Print a table, and write the plan and the figures that were asked for."""
    typer.echo(str(table))
    document = table_document(table) | figures
    if plan is not None:
        document["plan"] = plan_document(plan, out)
        if out is not None:
            from planner import api

            api.save(plan, out)
            typer.echo(f"wrote {out}")
    write_json(json_file, document)
