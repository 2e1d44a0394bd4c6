"""Identity of this machine, and the folder of its measurements."""

from __future__ import annotations

import os
import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from shutil import which
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveInt, SerializerFunctionWrapHandler, model_serializer

CACHE_VARIABLE = "MESHWRIGHT_CACHE"


class MachineIdentity(BaseModel):
    """Properties of a machine that measurements depend on; figures of another identity are refused.

    Parameters
    ----------
    processor
        Model name of the processor.
    cores
        Cores that this process may use.
    torch_version
        Version of the installed torch distribution.
    device
        CUDA device with its driver and CUDA's version; None for measurements of processes on the CPU.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    processor: str
    cores: PositiveInt
    torch_version: str
    device: str | None = None

    @model_serializer(mode="wrap")
    def _without_absent_device(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Fingerprints of processes on the CPU stay those of earlier versions."""
        written: dict[str, Any] = handler(self)
        return {name: value for name, value in written.items() if name != "device" or value is not None}


def current_machine(device: str = "cpu") -> MachineIdentity:
    """Identity of the machine that runs this process; for the CPU it is found without importing torch.

    Parameters
    ----------
    device
        Kind of device whose figures are meant, ``cpu`` or ``cuda``.
    """
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = "none"
    return MachineIdentity(
        processor=_processor_name(),
        cores=available_cores(),
        torch_version=torch_version,
        device=_device_name() if device == "cuda" else None,
    )


def available_cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def physical_memory_bytes() -> int:
    """Bytes of physical memory of this machine."""
    return int(os.sysconf("SC_PHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))


def cache_directory() -> Path:
    """Folder of measured files: ``$MESHWRIGHT_CACHE``, else ``~/.cache/meshwright``."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen) if chosen else Path.home() / ".cache" / "meshwright"


@cache
def _device_name() -> str:
    import torch

    if not torch.cuda.is_available():
        return "none"
    driver = ""
    if tool := which("nvidia-smi"):
        asked = [tool, "--query-gpu=driver_version", "--format=csv,noheader"]
        found = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False)
        driver = next(iter(found.stdout.split()), "")
    return f"{torch.cuda.get_device_name(0)}, driver {driver or 'unknown'}, CUDA {torch.version.cuda}"


def _processor_name() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
