"""Identity of this machine, and the folder of its measurements."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel, ConfigDict, PositiveInt

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
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    processor: str
    cores: PositiveInt
    torch_version: str


def current_machine() -> MachineIdentity:
    """Identity of the machine that runs this process (without importing torch)."""
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = "none"
    return MachineIdentity(processor=_processor_name(), cores=available_cores(), torch_version=torch_version)


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


def _processor_name() -> str:
    listing = Path("/proc/cpuinfo")
    if listing.exists():
        for line in listing.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
