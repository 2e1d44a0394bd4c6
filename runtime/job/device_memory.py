"""Whether a plan's tensors fit into the device at hand, asked before anything is allocated."""

from __future__ import annotations

import os

import torch

from planner.common.units import format_bytes
from planner.machine.identity import physical_memory_bytes
from runtime.job.process_group import LaunchError


class DeviceMemoryError(LaunchError):
    """A plan that holds more bytes than the device has."""


def check_device_memory(peak_bytes: int, device: torch.device, reserve_bytes: int = 0) -> None:
    """Refuse a plan that needs more memory than this rank has; on CPU the ranks of a machine share its memory.

    Parameters
    ----------
    peak_bytes
        The most bytes of tensors that the plan holds on one device.
    device
        Of this rank.
    reserve_bytes
        What the plan leaves to the context, libraries and communicators of a CUDA device.

    Raises
    ------
    DeviceMemoryError
        The device has less; the message names both, and a limit to plan for.
    """
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        here, name, shared = found.total_memory, f"{device} ({found.name})", 1
    else:
        here, shared = physical_memory_bytes(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        name = f"this machine, shared by {shared} ranks," if shared > 1 else "this machine"
    reserve = reserve_bytes if device.type == "cuda" else 0
    if (peak_bytes + reserve) * shared > here:
        beside = f" beside a reserve of {format_bytes(reserve)}" if reserve else ""
        raise DeviceMemoryError(
            f"the plan holds {format_bytes(peak_bytes)} of tensors on a device{beside}; {name} has "
            f"{format_bytes(here)}: plan with --memory {format_bytes(here // shared)} or less, or run on other devices"
        )
