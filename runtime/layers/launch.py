"""Runs a layer plan on this machine: one process per device through torch's launcher, and one report."""

from __future__ import annotations

from pathlib import Path

from planner.layers.plan.check import check_layer_plan
from planner.layers.plan.document import LayerPlan, load_layer_plan, save_layer_plan
from planner.models.references import check_code
from runtime.job.launch import run_module
from runtime.job.planned_device import device_of_run
from runtime.layers.reference import model_reference
from runtime.layers.report import LayerRunReport


def run_layer_plan(
    plan: LayerPlan | Path | str,
    *,
    steps: int = 5,
    check: bool = False,
    data: Path | str | None = None,
    device: str | None = None,
    allow_code: bool = False,
) -> LayerRunReport:
    """Run a layer plan on this machine, one process per device.

    Parameters
    ----------
    plan
        A plan or its file.
    steps, check, data, device, allow_code
        As :func:`runtime.job.launch.run_plan` takes them.

    Returns
    -------
    LayerRunReport

    Raises
    ------
    PlanError
        The plan cannot be read, contradicts itself, or is of a profile file.
    ModelError
        Its model is code that was not allowed.
    LaunchError
        The run cannot be started or a rank fails, for example because the model cannot be run as planned.
    """
    checked = plan if isinstance(plan, LayerPlan) else load_layer_plan(Path(plan))
    check_layer_plan(checked)
    model_reference(checked)  # refuses a plan of a profile file before ranks are started
    check_code(checked.model.source, allow_code)
    device = device_of_run(device, checked)
    report = run_module(
        "runtime.layer_main",
        checked.devices,
        lambda path: save_layer_plan(checked, path),
        steps=steps,
        check=check,
        data=data,
        device=device,
    )
    return LayerRunReport.model_validate_json(report)
