"""The command ``validate``: predicted beside measured, for plans or for random plans of a model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from planner.common.units import format_bytes, format_seconds
from runtime.commands.options import (
    AllowCode,
    Batch,
    Cluster,
    JsonFile,
    Step,
)
from runtime.commands.tables.progress import progress_line
from runtime.commands.values import OptionError, figure_file, parse_mesh, readable_file, write_json

if TYPE_CHECKING:
    from rich.table import Table

    from planner.api import AnyPlan
    from planner.models.references import ModelReference
    from runtime.prediction.validation import Validation


def validate(
    step: Step,
    plan_files: Annotated[
        list[Path] | None, typer.Argument(metavar="[PLAN]...", help="Plan files.", show_default=False)
    ] = None,
    sample: Annotated[int, typer.Option(min=0, help="Random plans of --model to run beside them.")] = 0,
    model: Annotated[str | None, typer.Option(help="Model of the sample.", show_default=False)] = None,
    mesh: Annotated[str | None, typer.Option(metavar="2x2", help="Mesh of the sample.", show_default=False)] = None,
    cluster: Cluster = "local-cpu",
    batch: Batch = 8,
    steps: Annotated[int, typer.Option(min=2, help="Steps of each run; the first is not timed.")] = 4,
    rounds: Annotated[
        int, typer.Option(min=1, help="Runs of each plan, the others between them; their median counts.")
    ] = 1,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; that of each plan's cluster if left out.", show_default=False)
    ] = None,
    json_file: JsonFile = None,
    plot: Annotated[Path | None, typer.Option(help="Scatter plot to write (PNG, SVG).", show_default=False)] = None,
    allow_code: AllowCode = False,
) -> None:
    """Run plans and compare their time and peak memory with what they predict."""
    files = plan_files or []
    for path in files:
        readable_file(path, "PLAN")
    if plot is not None:
        figure_file(plot, "--plot")
    if not files and not sample:
        raise OptionError("PLAN: give plan files, or --sample with a --model and a --mesh")
    if bool(sample) != (model is not None and mesh is not None):
        raise OptionError("--sample: give a --model and a --mesh with it, and neither of them without it")
    if device not in (None, "cpu", "cuda"):
        raise OptionError(f"--device: {device!r} is unknown; choose cpu or cuda")

    from runtime.prediction.validation import validate as run_and_compare

    plans = _read(files, allow_code)
    if model is not None and mesh is not None:
        reference, shape = step.reference(model, batch), parse_mesh(mesh, "--mesh")
        plans += _sampled(reference, cluster, shape, step.optimizer, sample, step.seed)
    with progress_line(f"running {len(plans)} plans"):
        found = run_and_compare(
            plans, steps=steps, rounds=rounds, device=device, progress=lambda name: typer.echo(f"running {name}")
        )
    _print(found)
    write_json(json_file, {"plans": [asdict(plan) for plan in found.plans], **_summary(found)})
    if plot is not None:
        from planner.plots import predicted_and_measured

        times = [(each.predicted_s, each.measured_s) for each in found.plans]
        predicted_and_measured({"plans": times}, "time of a step", "s").savefig(plot)


def _read(files: list[Path], allow_code: bool) -> list[tuple[str, AnyPlan]]:
    from planner.api import load
    from planner.layers.plan.document import LayerPlan
    from planner.models.references import check_code

    plans = [(path.name, load(path)) for path in files]
    for _, plan in plans:
        model = plan.model if isinstance(plan, LayerPlan) else plan.decision.model
        check_code(model.source, allow_code)
    return plans


def _sampled(
    reference: ModelReference, cluster: str, mesh: tuple[int, ...], optimizer: str | None, count: int, seed: int
) -> list[tuple[str, AnyPlan]]:
    from planner.session import PlanningSession
    from runtime.prediction.random_plans import random_plans

    with progress_line(f"drawing {count} plans of {reference.source}"):
        session = PlanningSession(reference, cluster, mesh, optimizer)
        return [(f"random {number}", plan) for number, plan in enumerate(random_plans(session, count, seed))]


def _summary(found: Validation) -> dict[str, float | None]:
    return {
        "mean_time_error": found.mean_time_error,
        "mean_memory_error": found.mean_memory_error,
        "rank_correlation": found.rank_correlation,
        "repeatability": found.repeatability,
        "mean_spread": found.mean_spread,
        "chosen_over_best": found.chosen_over_best,
    }


def _print(found: Validation) -> None:
    from rich.console import Console

    Console().print(_table(found))
    typer.echo(
        f"mean error: {found.mean_time_error:.1%} of time, {found.mean_memory_error:.2%} of peak memory; "
        f"rank correlation {_correlation(found.rank_correlation)}; "
        f"the plan of least predicted time takes {found.chosen_over_best:.3f} times the least measured"
    )
    if found.mean_spread is not None:
        typer.echo(
            f"runs of one plan differ by {found.mean_spread:.1%} in the mean; "
            f"rank correlation of two rounds {_correlation(found.repeatability)}"
        )


def _correlation(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _table(found: Validation) -> Table:
    from rich.table import Table

    table = Table()
    for heading in ("plan", "predicted", "measured", "ratio", "peak predicted", "measured", "error"):
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    for plan in found.plans:
        table.add_row(
            plan.name,
            format_seconds(plan.predicted_s),
            format_seconds(plan.measured_s),
            f"{1 + plan.time_error:.3f}",
            format_bytes(plan.predicted_bytes),
            format_bytes(plan.measured_bytes),
            f"{plan.memory_error:.2%}",
        )
    return table
