"""Measures the machines of a job that a launcher started: every rank calls this, all at once as in a step."""

from __future__ import annotations

import os
from pathlib import Path

import torch.distributed as dist

from planner.machine.calibration import (
    CalibrationError,
    RankReport,
    cluster_of_machines,
    cuda_cluster,
    local_cluster,
    save_cluster,
)
from planner.machine.cluster import ClusterSpec, local_cluster_path
from planner.torch_adapter.local.collectives import MeshGroups
from runtime.calibration.microbenchmarks import measure_rank
from runtime.job.layout import device_mesh, ranks_by_machine
from runtime.job.membership import joined
from runtime.job.process_group import broadcast_text, gather_texts, rank_device, round_as_float32


def calibrate_job(path: Path | None, kind: str = "cpu", seconds_per_kernel: float = 0.3) -> ClusterSpec:
    """Measure all ranks of a job and the links inside and between its machines; rank 0 writes the cluster.

    Parameters
    ----------
    path
        File to write; with one machine by default that of ``local-cpu`` or ``local-cuda``. The cluster of several
        machines is named after it.
    kind
        ``cpu`` or ``cuda``.
    seconds_per_kernel
        How long each kernel and each collective is timed.

    Returns
    -------
    ClusterSpec
        The same on every rank.

    Raises
    ------
    CalibrationError
        There is one rank alone, machines have different numbers of ranks, several have no file, or timings that no
        cluster can explain.
    LaunchError
        There is no such device for every rank.
    """
    device = rank_device(kind)
    with joined(device) as membership:
        membership.exit_code = 1
        per_machine = _ranks_of_each_machine()
        machines = dist.get_world_size() // per_machine
        if machines > 1 and path is None:
            raise CalibrationError("the cluster of several machines has no file of its own: name one with --out")
        if kind == "cuda":
            round_as_float32()
        report = measure_rank(MeshGroups.of(device_mesh(kind, (machines, per_machine))), seconds_per_kernel, device)
        texts = gather_texts(report.model_dump_json())
        reports = [RankReport.model_validate_json(texts[rank]) for rank in ranks_by_machine()]
        if machines > 1:
            assert path is not None
            cluster = cluster_of_machines(reports, per_machine, path.stem)
        else:
            cluster = (cuda_cluster if kind == "cuda" else local_cluster)(reports)
        cluster = ClusterSpec.model_validate_json(broadcast_text(cluster.model_dump_json()))  # with rank 0's memory
        if dist.get_rank() == 0:
            save_cluster(cluster, path or local_cluster_path(kind))
        membership.exit_code = 0
    return cluster


def _ranks_of_each_machine() -> int:
    """Ranks of this machine; a collective that refuses jobs whose machines have different numbers, and one rank."""
    counts = [int(text) for text in gather_texts(os.environ.get("LOCAL_WORLD_SIZE", "1"))]
    if len(counts) == 1:
        raise CalibrationError("a job of one rank has no collectives to measure: start at least 2 ranks")
    if len(set(counts)) > 1:
        raise CalibrationError(
            f"machines have {min(counts)} to {max(counts)} ranks: start as many on each, as plans count on equal ones"
        )
    return counts[0]
