"""The command ``calibrate``: rates of this machine, or costs of a model's own instructions on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from planner.common.units import format_seconds
from runtime.commands.options import AllowCode, Batch, Formulation, JsonFile, Memory, Step
from runtime.commands.tables.progress import progress_line
from runtime.commands.values import (
    OptionError,
    is_first_rank,
    parse_bytes,
    parse_mesh,
    readable_file,
    started_by_launcher,
    writable_file,
    write_json,
)

if TYPE_CHECKING:
    from planner.machine.cluster import ClusterSpec
    from planner.plan.document import Plan
    from runtime.measure.run_report import RunReport


def calibrate(
    step: Step,
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Processes that measure at once, as many as plans will have: 2 if absent; on CUDA all devices.",
            show_default=False,
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="What to measure: cpu (processes) or cuda.")] = "cpu",
    out: Annotated[
        Path | None, typer.Option(help="Cluster file; that of local-cpu or local-cuda if absent.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Measure the instructions that plans of this model use.", show_default=False)
    ] = None,
    mesh: Annotated[str | None, typer.Option(metavar="2x2", help="Mesh of these plans.", show_default=False)] = None,
    sample: Annotated[
        int, typer.Option(min=0, help="Plans to measure as well, at most: random ones that use many instructions.")
    ] = 0,
    memory: Memory = None,
    batch: Batch = 8,
    model_formulation: Formulation = "kiwi_chain",
    time_limit: Annotated[float, typer.Option(min=0.1, help="Seconds for the solver, per plan of the model.")] = 10.0,
    plan_file: Annotated[
        Path | None, typer.Option("--plan", help="Plan that ran with --profile elsewhere.", show_default=False)
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Report of that run; --out is its cluster, which gets the costs.")
    ] = None,
    allow_code: AllowCode = False,
    json_file: JsonFile = None,
) -> None:
    """Measure this machine, in under a minute, and keep the result as the cluster local-cpu, or local-cuda.

    Costs of instructions that were measured before are forgotten then. With --model, plans of a model are run with
    every instruction timed and made again with what was measured, until they have no instruction that was not; the
    cluster keeps these costs. The other options say which plans.

    As one rank of a job that torchrun started, measure all its machines and the links between them into --out. Costs of
    a plan's instructions there come from its run: run --profile --report, then calibrate --plan --report.
    """
    of_job = started_by_launcher()
    if device not in ("cpu", "cuda"):
        raise OptionError(f"--device {device!r}: choose cpu or cuda")
    if device == "cpu" and ranks == 1:
        raise OptionError("--ranks 1: collectives need at least 2 processes")
    if out is not None and is_first_rank():  # other machines may lack the folder
        writable_file(out, "--out")
    if plan_file is not None or report is not None:
        write_json(json_file, _add_costs(plan_file, report, out, allow_code))
        return
    if of_job:
        if model is not None or ranks is not None:
            given = "--model" if model is not None else "--ranks"
            raise OptionError(f"{given}: a job that a launcher started is measured as it is; leave it out")
        _calibrate_job(out, device, json_file)
        return
    if model is None:
        if mesh is not None or memory is not None or sample:
            raise OptionError(
                "--mesh, --memory and --sample are of plans of a model; give --model, or --ranks for the machine"
            )
        write_json(json_file, _calibrate_machine(ranks, out, device))
        return
    if mesh is None:
        raise OptionError("--model: give the --mesh of its plans as well, such as 2 or 2x2")
    shape, limit = parse_mesh(mesh, "--mesh"), None if memory is None else parse_bytes(memory, "--memory")

    from planner.session import PlanRequest
    from runtime.prediction.model_costs import calibrate_model

    request = PlanRequest(limit, model_formulation, time_limit=time_limit)
    with progress_line(f"measuring plans of {model}"):
        plan, ran, cluster = calibrate_model(
            step.reference(model, batch),
            shape,
            request,
            step.optimizer,
            out,
            sample=sample,
            progress=typer.echo,
            device=device,
        )
    _show(plan, ran)
    write_json(json_file, _figures(plan, ran, cluster, _written(out, device)))


def _add_costs(plan_file: Path | None, report_file: Path | None, out: Path | None, allow_code: bool) -> dict[str, Any]:
    """Keep the costs of a run elsewhere, and return what was predicted and measured, in seconds."""
    if plan_file is None or report_file is None or out is None:
        raise OptionError(
            "--plan, --report and --out: give the plan, the report of its run, and the file of its cluster"
        )
    readable_file(plan_file, "--plan")
    readable_file(report_file, "--report")
    readable_file(out, "--out")

    from planner.plan.document import load_plan
    from runtime.measure.run_report import read_report
    from runtime.prediction.model_costs import add_costs_of_run

    plan, report = load_plan(plan_file), read_report(report_file)
    cluster = add_costs_of_run(plan, report, out, allow_code)
    _show(plan, report)
    return _figures(plan, report, cluster, out)


def _figures(plan: Plan, report: RunReport, cluster: ClusterSpec, written: Path) -> dict[str, Any]:
    """Print how many instructions are measured, and return that with the seconds of a plan that ran."""
    measured = sum(map(len, cluster.costs.values()))
    typer.echo(f"{measured} instructions are measured; wrote {written}")
    return {
        "predicted_seconds": plan.objective_seconds,
        "measured_seconds": report.measured_step_s,
        "measured_instructions": measured,
        "out": str(written),
    }


def _calibrate_job(out: Path | None, kind: str, json_file: Path | None) -> None:
    """Measure the machines of a job as one of its ranks; rank 0 prints."""
    from runtime.calibration.job import calibrate_job

    cluster = calibrate_job(out, kind)
    if is_first_rank():
        write_json(json_file, _rates(cluster, _written(out, kind)))


def _calibrate_machine(ranks: int | None, out: Path | None, kind: str) -> dict[str, Any]:
    """Measure the machine, print its rates and return them, in operations, bytes and seconds."""
    from runtime.calibration.calibrate import calibrate as measure
    from runtime.calibration.calibrate import calibrate_devices

    if kind == "cuda":
        with progress_line("measuring CUDA devices"):
            cluster = calibrate_devices(ranks, out)
    else:
        with progress_line(f"measuring with {ranks or 2} processes"):
            cluster = measure(ranks or 2, out)
    return _rates(cluster, _written(out, kind))


def _rates(cluster: ClusterSpec, written: Path) -> dict[str, Any]:
    """Print the rates of a measured cluster and return them, in operations, bytes and seconds."""
    device, link, network = cluster.device, cluster.intra_node, cluster.inter_node
    links = [(link, "between ranks")] if cluster.devices_per_node > 1 else []
    links += [] if network is None else [(network, "between machines")]
    found = [
        f"{each.bandwidth / 1e9:.3g} GB/s and {format_seconds(each.latency_seconds)} {where}" for each, where in links
    ]
    rates = (
        f"{device.flops['float32'] / 1e9:.1f} GFLOP/s float32",
        f"{device.memory_bandwidth / 1e9:.1f} GB/s memory",
        *found,
    )
    typer.echo(f"{device.name}: {', '.join(rates)}\nwrote {written}")
    return {
        "device": device.name,
        "devices": cluster.devices,
        "flops": dict(device.flops),
        "memory_bandwidth": device.memory_bandwidth,
        "link_bandwidth": link.bandwidth if cluster.devices_per_node > 1 else None,
        "link_latency_seconds": link.latency_seconds if cluster.devices_per_node > 1 else None,
        "network_bandwidth": None if network is None else network.bandwidth,
        "network_latency_seconds": None if network is None else network.latency_seconds,
        "out": str(written),
    }


def _written(out: Path | None, kind: str) -> Path:
    from planner.machine.cluster import local_cluster_path

    return out or local_cluster_path(kind)


def _show(plan: Plan, report: RunReport) -> None:
    """Print what the last plan predicted beside what its run measured."""
    measured = report.measured_step_s
    assert measured is not None, "runs of a calibration have several steps"
    typer.echo(
        f"last plan: {format_seconds(plan.objective_seconds)} predicted, {format_seconds(measured)} measured, "
        f"ratio {measured / plan.objective_seconds:.3f}"
    )
