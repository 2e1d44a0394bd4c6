"""The command ``run``."""

from __future__ import annotations

import json
import tempfile
from contextlib import AbstractContextManager
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from runtime.commands.options import AllowCode, OtherCluster, PlanFile
from runtime.commands.tables.progress import progress_line
from runtime.commands.values import (
    STANDARD_OUTPUT,
    OptionError,
    is_first_rank,
    json_path,
    readable_file,
    started_by_launcher,
    writable_file,
    write_json,
)

if TYPE_CHECKING:
    from planner.plan.document import Plan
    from runtime.job.rank_job import RunOptions
    from runtime.measure.run_report import RunReport


def run(
    plan_file: PlanFile,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps; the first is metered, the others timed.")] = 5,
    check: Annotated[bool, typer.Option("--check", help="Compare with one process; code 1 if they differ.")] = False,
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--report",
            "--json",
            metavar="FILE",
            help="Report to write as JSON; - is standard output, and texts then go to standard error.",
            show_default=False,
        ),
    ] = None,
    data: Annotated[Path | None, typer.Option(help="File whose bytes are the tokens.", show_default=False)] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; that of the plan's cluster if left out.", show_default=False)
    ] = None,
    profile: Annotated[
        Path | None,
        typer.Option(help="Time every instruction; Chrome trace to write, beside tables.", show_default=False),
    ] = None,
    cluster: OtherCluster = None,
    allow_code: AllowCode = False,
    checkpoints: Annotated[
        Path | None,
        typer.Option(help="Folder of checkpoints and metrics; goes on from the last one.", show_default=False),
    ] = None,
    every: Annotated[int, typer.Option(min=0, help="Steps between checkpoints; 0: the last step alone.")] = 0,
    max_restarts: Annotated[int, typer.Option(min=0, help="Restarts from the last checkpoint after a failure.")] = 0,
) -> int:
    """Run a plan on local processes, or as one rank of a job that torchrun started."""
    started_by_torchrun = started_by_launcher()
    if not started_by_torchrun:
        readable_file(plan_file, "PLAN")
    from planner.layers.plan.document import is_layer_plan
    from runtime.job.rank_job import RunOptions

    of_layers = is_layer_plan(plan_file)
    if checkpoints is None and (every or max_restarts):
        option, value = ("--max-restarts", max_restarts) if max_restarts else ("--every", every)
        raise OptionError(f"{option}: {value} needs checkpoints to go on from; add --checkpoints FOLDER")
    if of_layers and started_by_torchrun and checkpoints is None:
        raise OptionError(f"PLAN: {plan_file} is a plan of layers; torchrun starts those with -m runtime.layer_main")
    if data is not None:
        readable_file(data, "--data")
    if device not in (None, "cpu", "cuda"):
        raise OptionError(f"--device: {device!r} is unknown; choose cpu or cuda")
    if profile is not None and of_layers:
        raise OptionError("--profile: no instructions are timed in a run of layers; leave it out")
    if profile is not None and is_first_rank():  # other machines may lack folder and plan
        writable_file(profile, "--profile")
        _check_cluster(plan_file, cluster)
    options = RunOptions(
        plan_file,
        steps,
        check,
        data,
        device,
        json_path(json_file),
        Path(tempfile.gettempdir()),
        profile=profile is not None,
        allow_code=allow_code,
        checkpoints=checkpoints,
        every=every,
    )
    if checkpoints is not None:
        if check or profile is not None:
            raise OptionError(
                "--checkpoints: a run that is kept is neither compared nor timed; leave --check and --profile out"
            )
        return _train(options, max_restarts, started_by_torchrun, json_file)
    if of_layers:
        return _run_layers(options, json_file)
    run_operators = _run_as_rank if started_by_torchrun else _run_locally
    return run_operators(options, json_file, profile, cluster)


def _train(options: RunOptions, max_restarts: int, started_by_torchrun: bool, json_file: Path | None) -> int:
    """Train with checkpoints, on local processes or as one rank of torchrun's job."""
    if started_by_torchrun:
        if max_restarts:
            raise OptionError(f"--max-restarts: {max_restarts} in a run that torchrun started; it has its own option")
        from runtime.train_main import train_rank

        found = train_rank(options)
    else:
        from runtime.job.launch import train_plan

        with progress_line(f"training up to step {options.steps}"):
            found = train_plan(options, max_restarts)
    if is_first_rank():
        end = json.loads(found)
        found = "was reached before" if end["loss"] is None else f"has loss {end['loss']:.6f}"
        typer.echo(f"step {end['steps']} {found}; checkpoints and metrics are in {options.checkpoints}")
        if json_file == STANDARD_OUTPUT:
            write_json(json_file, end)
    return 0


def _run_locally(options: RunOptions, json_file: Path | None, profile: Path | None, cluster: str | None) -> int:
    from planner.plan.document import load_plan
    from runtime.job.launch import run_plan

    plan = load_plan(options.plan)
    with _running(options, prod(plan.decision.options.mesh)):
        found = run_plan(
            plan,
            steps=options.steps,
            check=options.check,
            data=options.data,
            device=options.device,
            profile=options.profile,
            allow_code=options.allow_code,
        )
    write_json(json_file, json.loads(found.model_dump_json()))
    _show(plan, found)
    if profile is not None:
        _show_profile(plan, found, profile, cluster, options.allow_code)
    return found.exit_code


def _check_cluster(plan_file: Path, cluster: str | None) -> None:
    """Refuse a profile of a plan whose cluster is not found, before the plan runs."""
    from planner.machine.cluster import ClusterError, load_cluster
    from planner.plan.document import load_plan

    name = cluster or load_plan(plan_file).decision.options.cluster
    try:
        load_cluster(name)
    except ClusterError as error:
        raise OptionError(
            f"--profile: instructions are priced with the plan's cluster; give --cluster ({error})"
        ) from None


def _running(options: RunOptions, ranks: int) -> AbstractContextManager[object]:
    """A line beside a run on so many local processes."""
    beside = " and on one process" if options.check else ""
    return progress_line(f"running {options.steps} steps on {ranks} ranks{beside}")


def _run_layers(options: RunOptions, json_file: Path | None) -> int:
    """Run a plan of layers on local processes and print predicted beside measured figures."""
    from rich.console import Console

    from planner.layers.plan.document import load_layer_plan
    from runtime.commands.tables.layers import run_table
    from runtime.layers.launch import run_layer_plan

    plan = load_layer_plan(options.plan)
    with _running(options, plan.devices):
        found = run_layer_plan(
            plan,
            steps=options.steps,
            check=options.check,
            data=options.data,
            device=options.device,
            allow_code=options.allow_code,
        )
    write_json(json_file, json.loads(found.model_dump_json()))
    Console().print(run_table(plan, found))
    for failure in found.failures():
        Console(stderr=True).print(f"[red]{failure}[/red]")
    return found.exit_code


def _show_profile(plan: Plan, found: RunReport, trace: Path, cluster: str | None, allow_code: bool) -> None:
    from rich.console import Console

    from runtime.commands.tables.profile import profile_of_run, profile_tables

    profiled = profile_of_run(plan, found, cluster, allow_code)
    profiled.save_trace(trace)
    Console().print(*profile_tables(profiled), sep="\n")


def _run_as_rank(options: RunOptions, json_file: Path | None, profile: Path | None, cluster: str | None) -> int:
    """Do one rank's part; rank 0 reads the plan and prints the tables."""
    from runtime.rank_main import run_rank

    def show(plan: Plan, found: RunReport) -> None:
        _show(plan, found)
        if json_file == STANDARD_OUTPUT:
            write_json(json_file, json.loads(found.model_dump_json()))
        if profile is not None:
            _show_profile(plan, found, profile, cluster, options.allow_code)

    return run_rank(options, show)


def _show(plan: Plan, found: RunReport) -> None:
    from rich.console import Console

    from runtime.commands.tables.run import run_table
    from runtime.rank_main import print_failures

    Console().print(run_table(plan, found))
    print_failures(plan, found)
