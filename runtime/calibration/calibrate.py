"""Measures this machine: one process per rank over gloo, all running at once, as in a training step."""

from __future__ import annotations

import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import ProcessException, SpawnContext, spawn

from planner.machine.calibration import CalibrationError, RankReport, local_cluster, save_cluster
from planner.machine.cluster import ClusterSpec, local_cluster_path
from planner.machine.identity import available_cores
from planner.torch_adapter.local.collectives import MeshGroups
from runtime.calibration.microbenchmarks import measure_rank
from runtime.job.allocator import keep_freed_memory

TIME_LIMIT_SECONDS = 300.0


def calibrate(ranks: int = 2, path: Path | str | None = None, seconds_per_kernel: float = 0.3) -> ClusterSpec:
    """Measure this machine with ``ranks`` processes at once and save it as cluster ``local-cpu``.

    Takes about half a minute, a minute on a busy machine. Each process uses ``cores // ranks`` threads (at least one).

    Parameters
    ----------
    ranks
        Number of processes; the plans that run on this machine should have as many.
    path
        File to write; by default where ``load_cluster("local-cpu")`` looks for it.
    seconds_per_kernel
        How long each kernel and each collective is timed.

    Returns
    -------
    ClusterSpec
        The measured cluster, as written.

    Raises
    ------
    CalibrationError
        Fewer than two ranks, a rank that failed or hung, or timings that no cluster can explain.
    """
    if ranks < 2:
        raise CalibrationError(f"ranks must be at least 2 to measure collectives, not {ranks}")
    cluster = local_cluster(_measure(ranks, seconds_per_kernel))
    save_cluster(cluster, Path(path) if path is not None else local_cluster_path())
    return cluster


def _measure(ranks: int, seconds: float) -> list[RankReport]:
    with tempfile.TemporaryDirectory(prefix="meshwright-calibrate-") as folder:
        context: SpawnContext = spawn(  # type: ignore[no-untyped-call]
            _rank_main, args=(ranks, folder, seconds), nprocs=ranks, join=False
        )
        deadline = time.monotonic() + TIME_LIMIT_SECONDS
        try:
            while not context.join(timeout=max(0.0, min(1.0, deadline - time.monotonic()))):
                if time.monotonic() >= deadline:
                    raise CalibrationError(
                        f"{ranks} ranks did not finish measuring within {TIME_LIMIT_SECONDS:.0f} s: "
                        "use fewer ranks or a less busy machine"
                    )
        except ProcessException as error:
            last = str(error).strip().splitlines()[-1]
            raise CalibrationError(f"a rank failed while measuring: {last}") from error
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
        return [RankReport.model_validate_json(_report(folder, rank).read_text()) for rank in range(ranks)]


def _report(folder: str, rank: int) -> Path:
    return Path(folder) / f"rank{rank}.json"


def _rank_main(rank: int, ranks: int, folder: str, seconds: float) -> None:
    torch.set_num_threads(max(1, available_cores() // ranks))
    keep_freed_memory()
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
    )
    groups = MeshGroups.of(init_device_mesh("cpu", (ranks,)))
    report = measure_rank(groups, seconds)
    _report(folder, rank).write_text(report.model_dump_json(), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
