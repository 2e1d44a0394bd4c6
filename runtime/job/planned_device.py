"""The device that a plan is for, beside the one that is here: another kind is refused, another machine is named."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from planner.layers.plan.document import LayerPlan, is_layer_plan, load_layer_plan
from planner.machine.cluster import METHOD, Measurement
from planner.machine.identity import current_machine
from planner.plan.document import Plan, load_plan
from runtime.job.process_group import LaunchError

MOST_RANKS = 1024
"""Processes that a calibration may have had at once."""


def planned_kind(plan: Plan | LayerPlan) -> str:
    """Kind of device that a plan is for: ``cuda`` where it says so, else ``cpu``."""
    if isinstance(plan, Plan):
        return plan.decision.options.device or "cpu"
    return "cpu" if plan.machine is None else plan.machine.device


def _planned_cluster(plan: Plan | LayerPlan) -> str:
    if isinstance(plan, Plan):
        return plan.decision.options.cluster
    return "" if plan.machine is None else plan.machine.cluster


def check_kind(plan: Plan | LayerPlan, found: str) -> None:
    """Refuse a device of another kind than the plan's, where the user did not ask for it.

    Parameters
    ----------
    plan
        The plan.
    found
        Kind of device that is here.

    Raises
    ------
    LaunchError
        The plan is for CUDA devices, and there are none.
    """
    if planned_kind(plan) == "cuda" != found:
        raise LaunchError(
            f"the plan is for CUDA devices of cluster {_planned_cluster(plan)}, and none is found here: run it "
            "where they are, plan for this machine, or ask for the CPU (--device cpu, device='cpu')"
        )


def device_of_run(wanted: str | None, plan: Plan | LayerPlan) -> str:
    """Kind of device of a run: the one that is asked for, else the plan's.

    Raises
    ------
    LaunchError
        The plan's is not here.
    """
    if wanted is not None:
        return wanted
    check_kind(plan, _kind_here())
    return planned_kind(plan)


def kind_for_rank(wanted: str | None, path: Path) -> str:
    """Kind of device of a rank that a launcher started: as :func:`device_of_run`, for the plan in a file.

    Where rank 0 alone has the file, the others go by their machine.

    Raises
    ------
    LaunchError
        The plan's is not here.
    """
    if wanted is not None:
        return wanted
    if not path.exists():
        return _kind_here()
    return device_of_run(None, load_layer_plan(path) if is_layer_plan(path) else load_plan(path))


def _kind_here() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def print_calibration_note(plan: Plan | LayerPlan) -> None:
    """Print :func:`calibration_note` on rank 0, however the ranks were started."""
    note = calibration_note(plan) if dist.get_rank() == 0 else ""
    if note:
        print("meshwright: note:", note, file=sys.stderr)


def calibration_note(plan: Plan | LayerPlan) -> str:
    """What to say of a plan whose costs were measured on another machine than this one; empty where they were not."""
    if isinstance(plan, Plan):
        planned = plan.decision.fingerprints.calibration
    else:
        planned = None if plan.machine is None else plan.machine.calibration
    if planned is None:
        return ""
    here = current_machine(planned_kind(plan))
    known = (
        Measurement(machine=here, ranks=ranks, method=by) for by in (METHOD, 1) for ranks in range(1, MOST_RANKS + 1)
    )
    if any(measurement.fingerprint() == planned for measurement in known):
        return ""
    named = here.device or f"{here.processor}, {here.cores} cores"
    return (
        f"the plan's costs were measured on another machine than this one ({named}, torch {here.torch_version}): its "
        "predicted seconds are not those of this machine; calibrate and plan again here"
    )
