"""Ranks that Slurm's ``srun`` started, one task each: its variables as those of torch's launcher.

``slurm.sh`` beside this file is a job to copy. Ranks are numbered machine by machine whatever the distribution of the
tasks is, so that the inner axes of a mesh stay inside a machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, MutableMapping

from runtime.job.process_group import LaunchError

_FIRST_PORT, _PORTS = 15_000, 17_000
"""Below the ports from which Linux takes those of outgoing connections."""
_NEEDED = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_STEP_NODELIST", "SLURM_NODEID", "SLURM_LOCALID", "SLURM_JOB_ID")


def adopt_slurm(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what torch's launcher sets, where ``srun`` started this process as one task of several.

    A launcher's own variables stay as they are.

    Raises
    ------
    LaunchError
        Slurm's variables are not all there, or cannot be read.
    """
    if "RANK" in environment or int(environment.get("SLURM_STEP_NUM_TASKS", "1")) == 1:
        return
    for name, value in launcher_variables(environment).items():
        environment.setdefault(name, value)


def launcher_variables(slurm: Mapping[str, str]) -> dict[str, str]:
    """Variables of torch's launcher for a task of a step of Slurm; errors as for :func:`adopt_slurm`."""
    missing = [name for name in _NEEDED if name not in slurm]
    if missing:
        raise LaunchError(
            f"{', '.join(missing)}: not set in this step of Slurm; start ranks with srun, or with torchrun"
        )
    tasks = tasks_per_node(slurm["SLURM_STEP_TASKS_PER_NODE"])
    node, local = int(slurm["SLURM_NODEID"]), int(slurm["SLURM_LOCALID"])
    if node >= len(tasks) or local >= tasks[node]:
        raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE {slurm['SLURM_STEP_TASKS_PER_NODE']}: no task {local} on {node}")
    step = int(slurm.get("SLURM_STEP_ID", "0"))
    return {
        "RANK": str(sum(tasks[:node]) + local),
        "WORLD_SIZE": str(sum(tasks)),
        "LOCAL_RANK": str(local),
        "LOCAL_WORLD_SIZE": str(tasks[node]),
        "GROUP_RANK": str(node),
        "MASTER_ADDR": first_host(slurm["SLURM_STEP_NODELIST"]),
        "MASTER_PORT": str(_FIRST_PORT + (int(slurm["SLURM_JOB_ID"]) * 31 + step) % _PORTS),
    }


def tasks_per_node(text: str) -> list[int]:
    """Tasks of each machine, from ``2(x3),1``."""
    found: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise LaunchError(f"SLURM_STEP_TASKS_PER_NODE {text!r}: counts such as 2(x3),1 are expected")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def first_host(text: str) -> str:
    """First machine of a list such as ``gpu[007-009,12]-ib,login1``."""
    match = re.match(r"([^,\[]+)(?:\[(\d+)[^\]]*\]([^,\[]*))?", text)
    if match is None:
        raise LaunchError(f"SLURM_STEP_NODELIST {text!r}: names such as gpu[007-009],login1 are expected")
    return "".join(part or "" for part in match.groups())
