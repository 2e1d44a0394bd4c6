"""Runs a layer plan on this machine: one process per device through torch's launcher, and one report."""

from __future__ import annotations

import tempfile
from pathlib import Path

from planner.layer_plan import LayerPlan, load_layer_plan, save_layer_plan
from planner.layer_plan_check import check_layer_plan
from runtime.launch import launch_ranks
from runtime.layer_main import PLAN_FILE
from runtime.layer_report import LayerRunReport, read_layer_report
from runtime.process_group import LaunchError


def run_layer_plan(
    plan: LayerPlan | Path | str,
    *,
    steps: int = 5,
    check: bool = False,
    data: Path | str | None = None,
    device: str = "cpu",
) -> LayerRunReport:
    """Run a layer plan on this machine, one process per device.

    Parameters
    ----------
    plan
        A plan or its file.
    steps, check, data, device
        As :func:`runtime.launch.run_plan` takes them.

    Returns
    -------
    LayerRunReport

    Raises
    ------
    PlanError
        The plan cannot be read, or contradicts itself.
    LaunchError
        The run cannot be started or a rank fails, for example because the model cannot be run as planned.
    """
    if steps < 1:
        raise LaunchError(f"steps {steps}: a run has at least one step")
    if data is not None and not Path(data).is_file():
        raise LaunchError(f"data {data} is no file: give a text file")
    if not isinstance(plan, LayerPlan):
        plan = load_layer_plan(Path(plan))
    check_layer_plan(plan)
    with tempfile.TemporaryDirectory(prefix="meshwright-layers-") as name:
        folder = Path(name)
        save_layer_plan(plan, folder / PLAN_FILE)
        report = folder / "report.json"
        arguments = [str(folder / PLAN_FILE), "--steps", str(steps), "--device", device]
        arguments += ["--report", str(report), "--scratch", str(folder / "scratch")]
        arguments += ["--check"] if check else []
        arguments += ["--data", str(Path(data).resolve())] if data is not None else []
        launch_ranks("runtime.layer_main", plan.devices, arguments, folder / "logs", report)
        return read_layer_report(report)
