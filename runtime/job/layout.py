"""The place of each rank in a mesh: machine by machine, so that the inner axes of a mesh stay inside one."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from functools import cache
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from planner.machine.cluster import ClusterError, load_cluster


def device_mesh(device_type: str, shape: Sequence[int], names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Mesh of all ranks, the last axis innermost; a collective of all ranks.

    Parameters
    ----------
    device_type
        ``cpu`` or ``cuda``.
    shape
        Size of each axis.
    names
        Of the axes.
    """
    order = ranks_by_machine()
    if order == tuple(range(len(order))):
        return init_device_mesh(device_type, tuple(shape), mesh_dim_names=names)
    return DeviceMesh(device_type, torch.tensor(order).reshape(tuple(shape)), mesh_dim_names=names)


def ranks_by_machine() -> tuple[int, ...]:
    """Ranks in the order of their machines, then of their places there; a collective of all ranks the first time.

    Launchers number them so already; ``mpirun --map-by node``, for example, deals them out.
    """
    return _ranks_by_machine(dist.get_world_size())


@cache
def _ranks_by_machine(ranks: int) -> tuple[int, ...]:
    if "LOCAL_RANK" not in os.environ:
        return tuple(range(ranks))
    own = os.environ.get("GROUP_RANK", socket.gethostname()), int(os.environ["LOCAL_RANK"])
    found: list[tuple[str, int]] = [own] * ranks
    dist.all_gather_object(found, own)
    machines: dict[str, int] = {}
    for machine, _ in found:
        machines.setdefault(machine, len(machines))
    return tuple(sorted(range(ranks), key=lambda rank: (machines[found[rank][0]], found[rank][1])))


def crossing_axes(mesh: Sequence[int], per_machine: int) -> list[int]:
    """Axes of a mesh whose ranks lie on several machines of so many ranks, as :class:`ClusterSpec` has it."""
    blocks = [prod(mesh[axis:]) for axis in range(len(mesh))]
    return [axis for axis, block in enumerate(blocks) if prod(mesh) > per_machine and per_machine % block]


def layout_note(mesh: Sequence[int], cluster: str, per_machine: int) -> str:
    """Axes that a plan has inside a machine and this job does not, as a note; empty where there are none.

    Parameters
    ----------
    mesh
        Size of each axis.
    cluster
        The plan's cluster; of one that is not known here nothing is said.
    per_machine
        Ranks of each machine of this job.
    """
    try:
        known = load_cluster(cluster)
    except ClusterError:
        return ""
    planned = [] if known.is_shared else crossing_axes(mesh, known.devices_per_node)
    wider = [axis for axis in crossing_axes(mesh, per_machine) if axis not in planned]
    if not wider:
        return ""
    name, axes = "x".join(map(str, mesh)), ", ".join(map(str, wider))
    return (
        f"axis {axes} of mesh {name} crosses machines, which have {per_machine} ranks each here; the plan has it "
        f"inside a machine of cluster {cluster}, so steps may take longer than predicted: start more ranks on a "
        "machine, or plan for a cluster of such machines"
    )


def print_layout_note(mesh: Sequence[int], cluster: str) -> None:
    """Print it on rank 0."""
    per_machine = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
    note = layout_note(mesh, cluster, per_machine) if dist.get_rank() == 0 else ""
    if note:
        print("meshwright: note:", note, file=sys.stderr)
