"""Measures this machine: one process per rank over gloo, or per CUDA device, all running at once as in a step."""

from __future__ import annotations

import tempfile
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.multiprocessing.spawn import ProcessException, SpawnContext, spawn

from planner.machine.calibration import CalibrationError, RankReport, cuda_cluster, local_cluster, save_cluster
from planner.machine.cluster import ClusterSpec, local_cluster_path
from planner.machine.identity import available_cores
from planner.torch_adapter.local.collectives import MeshGroups
from runtime.calibration.microbenchmarks import measure_rank
from runtime.job.allocator import keep_freed_memory
from runtime.job.process_group import backend_of, round_as_float32, use_device

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


def calibrate_devices(
    devices: int | None = None, path: Path | str | None = None, seconds_per_kernel: float = 0.1
) -> ClusterSpec:
    """Measure this machine's CUDA devices, all at once, and save them as cluster ``local-cuda``.

    Parameters
    ----------
    devices
        How many; all if None. Links between them are measured if there are two or more.
    path, seconds_per_kernel
        As for :func:`calibrate`.

    Raises
    ------
    CalibrationError
        There are not as many devices, a rank failed or hung, or no cluster can explain the timings.
    """
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not 1 <= (count := found if devices is None else devices) <= found:
        raise CalibrationError(
            f"{max(1, count)} CUDA devices are to be measured, and this machine has {found}: ask for fewer (--ranks), "
            "or measure its processors (--device cpu)"
        )
    cluster = cuda_cluster(_measure(count, seconds_per_kernel, "cuda"))
    save_cluster(cluster, Path(path) if path is not None else local_cluster_path("cuda"))
    return cluster


def _measure(ranks: int, seconds: float, kind: str = "cpu") -> list[RankReport]:
    with tempfile.TemporaryDirectory(prefix="meshwright-calibrate-") as folder:
        context: SpawnContext = spawn(  # type: ignore[no-untyped-call]
            _rank_main, args=(ranks, folder, seconds, kind), nprocs=ranks, join=False
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


def _rank_main(rank: int, ranks: int, folder: str, seconds: float, kind: str) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if device.type == "cuda":
        use_device(device)
        round_as_float32()
    else:
        torch.set_num_threads(max(1, available_cores() // ranks))
        keep_freed_memory()
    dist.init_process_group(
        backend_of(device),
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
        device_id=device if device.type == "cuda" else None,
    )
    groups = MeshGroups.of(init_device_mesh(kind, (1, ranks)))
    report = measure_rank(groups, seconds, device)
    _report(folder, rank).write_text(report.model_dump_json(), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
