"""The commands that start processes: ``run`` and ``calibrate``."""

from __future__ import annotations

import os
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.common.units import format_seconds
from runtime.commands.layers import run_layers
from runtime.commands.progress import progress_line
from runtime.commands.values import OptionError, readable_file, writable_file

if TYPE_CHECKING:
    from planner.plan.document import Plan
    from runtime.measure.run_report import RunReport


def run(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file.", show_default=False)],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps; the first is metered, the others timed.")] = 5,
    check: Annotated[bool, typer.Option("--check", help="Compare with one process; code 1 if they differ.")] = False,
    report: Annotated[Path | None, typer.Option(help="Report to write as JSON.", show_default=False)] = None,
    data: Annotated[Path | None, typer.Option(help="File whose bytes are the tokens.", show_default=False)] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
) -> int:
    """Run a plan on local processes, or as one rank of a job that torchrun started."""
    started_by_torchrun = "WORLD_SIZE" in os.environ
    if not started_by_torchrun:
        readable_file(plan_file, "PLAN")
    from planner.layers.plan.document import is_layer_plan

    of_layers = is_layer_plan(plan_file)
    if of_layers and started_by_torchrun:
        raise OptionError(f"PLAN: {plan_file} is a plan of layers; torchrun starts those with -m runtime.layer_main")
    if report is not None and os.environ.get("RANK", "0") == "0":
        writable_file(report, "--report")
    if data is not None:
        readable_file(data, "--data")
    if device not in ("cpu", "cuda"):
        raise OptionError(f"--device: {device!r} is unknown; choose cpu or cuda")
    start = run_layers if of_layers else _run_as_rank if started_by_torchrun else _run_locally
    return start(plan_file, steps, check, report, data, device)


def _run_locally(plan_file: Path, steps: int, check: bool, report: Path | None, data: Path | None, device: str) -> int:
    from planner.plan.document import load_plan
    from runtime.job.launch import run_plan
    from runtime.measure.run_report import write_report

    plan = load_plan(plan_file)
    ranks = prod(plan.decision.options.mesh)
    with progress_line(f"running {steps} steps on {ranks} ranks" + (" and on one process" if check else "")):
        found = run_plan(plan, steps=steps, check=check, data=data, device=device)
    if report is not None:
        write_report(found, report)
    _show(plan, found)
    return found.exit_code


def _run_as_rank(plan_file: Path, steps: int, check: bool, report: Path | None, data: Path | None, device: str) -> int:
    """Do one rank's part; rank 0 reads the plan and prints the table."""
    from runtime.job.rank_job import parse_options
    from runtime.rank_main import run_rank

    arguments = [str(plan_file), "--steps", str(steps), "--device", device]
    arguments += ["--check"] if check else []
    arguments += ["--report", str(report)] if report is not None else []
    arguments += ["--data", str(data)] if data is not None else []
    return run_rank(parse_options("meshwright run", arguments), _show)


def _show(plan: Plan, found: RunReport) -> None:
    from rich.console import Console

    from runtime.commands.report import run_table
    from runtime.rank_main import print_failures

    Console().print(run_table(plan, found))
    print_failures(plan, found)


def calibrate(
    ranks: Annotated[int, typer.Option(min=2, help="Processes that measure at once; as many as plans will have.")] = 2,
    out: Annotated[
        Path | None, typer.Option(help="Cluster file; local-cpu's own if absent.", show_default=False)
    ] = None,
) -> None:
    """Measure this machine, in under a minute, and keep the result as the cluster local-cpu."""
    if out is not None:
        writable_file(out, "--out")

    from planner.machine.cluster import local_cluster_path
    from runtime.calibration.calibrate import calibrate as measure

    with progress_line(f"measuring with {ranks} processes"):
        cluster = measure(ranks, out)
    device, link = cluster.device, cluster.intra_node
    typer.echo(
        f"{device.name}: {device.flops['float32'] / 1e9:.1f} GFLOP/s float32, "
        f"{device.memory_bandwidth / 1e9:.1f} GB/s memory, "
        f"{link.bandwidth / 1e9:.2f} GB/s and {format_seconds(link.latency_seconds)} between ranks\n"
        f"wrote {out or local_cluster_path()}"
    )
