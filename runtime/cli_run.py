"""The commands that start processes: ``run`` and ``calibrate``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from planner.units import format_seconds
from runtime.cli_progress import progress_line
from runtime.cli_values import readable_file, writable_file


def run(
    plan_file: Annotated[Path, typer.Argument(metavar="PLAN", help="Plan file.", show_default=False)],
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps.")] = 1,
    check: Annotated[bool, typer.Option("--check", help="Compare with one process; code 1 if they differ.")] = False,
    report: Annotated[Path | None, typer.Option(help="Report to write as JSON.", show_default=False)] = None,
    data: Annotated[Path | None, typer.Option(help="File whose bytes are the tokens.", show_default=False)] = None,
) -> int:
    """Run a plan on local processes, or on those that torchrun started."""
    readable_file(plan_file, "PLAN")
    if report is not None:
        writable_file(report, "--report")
    if data is not None:
        readable_file(data, "--data")
    return 0


def calibrate(
    ranks: Annotated[int, typer.Option(min=2, help="Processes that measure at once; as many as plans will have.")] = 2,
    out: Annotated[
        Path | None, typer.Option(help="Cluster file; local-cpu's own if absent.", show_default=False)
    ] = None,
) -> None:
    """Measure this machine, in under a minute, and keep the result as the cluster local-cpu."""
    if out is not None:
        writable_file(out, "--out")

    from planner.cluster import local_cluster_path
    from runtime.calibrate import calibrate as measure

    with progress_line(f"measuring with {ranks} processes"):
        cluster = measure(ranks, out)
    device, link = cluster.device, cluster.intra_node
    typer.echo(
        f"{device.name}: {device.flops['float32'] / 1e9:.1f} GFLOP/s float32, "
        f"{device.memory_bandwidth / 1e9:.1f} GB/s memory, "
        f"{link.bandwidth / 1e9:.2f} GB/s and {format_seconds(link.latency_seconds)} between ranks\n"
        f"wrote {out or local_cluster_path()}"
    )
