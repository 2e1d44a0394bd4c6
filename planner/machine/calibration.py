"""From timings of kernels and collectives to a :class:`ClusterSpec`, and its file.

Kernels: each class's rate is total work over total time net of launches, so a rate is a mean weighted by
time. Collectives: latency and bandwidth are a least squares fit of relative errors of the ring formula of
:mod:`planner.machine.cluster`, net of launches and local copies, which the cost model counts apart.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt

from formulations.problem.files import write_text_atomically
from planner.graph.operator_classes import ARITHMETIC, OperatorClass
from planner.machine.cluster import (
    LOCAL_DEVICE_NAME,
    LOCAL_NAME,
    METHOD,
    ClusterSpec,
    Collective,
    DeviceSpec,
    LinkSpec,
    Measurement,
    OverlapSpec,
)
from planner.machine.identity import current_machine, physical_memory_bytes

PROCESS_RESERVE_BYTES = 512 * 2**20
"""Memory of a Python process with torch and gloo that holds no tensor."""

ALLOCATOR_RESERVE_BYTES = 2**30
"""What torch's allocator of CUDA holds beyond tensors; up to 0.95 GB were seen under plans."""

SHARED_LINK = 1.5
"""Time of copies both ways at once over that of one, from which on both directions share the link's bandwidth."""


class CalibrationError(ValueError):
    """Measurements that give no cluster."""


class _Sample(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class KernelSample(_Sample):
    """Seconds of one call of a kernel, with the FLOP and the bytes that the cost model counts for it.

    ``key`` is that of its own rate in :attr:`DeviceSpec.efficiency`; empty where its rate is that of its class.
    """

    name: str
    kind: OperatorClass
    dtype: str
    flops: NonNegativeInt
    nbytes: NonNegativeInt
    seconds: PositiveFloat
    key: str = ""


class CollectiveSample(_Sample):
    """Seconds of one collective; ``nbytes`` as in :meth:`LinkSpec.collective_seconds`, ``copied_bytes`` local."""

    collective: Collective
    ranks: PositiveInt
    nbytes: PositiveInt
    copied_bytes: NonNegativeInt
    seconds: PositiveFloat


class OverlapSample(_Sample):
    """Seconds of the same computation and of the same collective, each alone and both at once."""

    computation_alone: PositiveFloat
    computation_beside: PositiveFloat
    collective_alone: PositiveFloat
    collective_beside: PositiveFloat

    @property
    def slowdowns(self) -> tuple[float, float]:
        """Of the computation and of the collective; at least 1."""
        return (
            max(1.0, self.computation_beside / self.computation_alone),
            max(1.0, self.collective_beside / self.collective_alone),
        )


class HostSample(_Sample):
    """Seconds of copies of ``nbytes`` bytes between a device and its host: each way, both at once, and a small one."""

    nbytes: PositiveInt
    out_seconds: PositiveFloat
    in_seconds: PositiveFloat
    both_seconds: PositiveFloat
    small_seconds: PositiveFloat


class FoundDevice(_Sample):
    """A CUDA device: its memory, bytes in use beside torch's allocator, and the host's seconds to start a kernel."""

    name: str
    memory_bytes: PositiveInt
    outside_bytes: NonNegativeInt
    dispatch_seconds: PositiveFloat


_Timed = TypeVar("_Timed", KernelSample, CollectiveSample)


class RankReport(_Sample):
    """Measurements of one rank; all ranks measure the same kernels and collectives in the same order.

    ``collectives`` are of the ranks of one machine, ``between`` of ranks on different machines, all machines' ranks at
    once. ``overlap`` is of processes on a CPU, ``host`` and ``device`` of CUDA devices.
    """

    launch_seconds: PositiveFloat
    kernels: tuple[KernelSample, ...]
    collectives: tuple[CollectiveSample, ...] = ()
    between: tuple[CollectiveSample, ...] = ()
    overlap: OverlapSample | None = None
    host: HostSample | None = None
    device: FoundDevice | None = None


def slowest(reports: Sequence[RankReport]) -> RankReport:
    """One report with each sample's time on its slowest rank, which determines the time of a step."""
    return RankReport(
        launch_seconds=max(report.launch_seconds for report in reports),
        kernels=tuple(_slowest(samples) for samples in zip(*(r.kernels for r in reports), strict=True)),
        collectives=tuple(_slowest(samples) for samples in zip(*(r.collectives for r in reports), strict=True)),
        between=tuple(_slowest(samples) for samples in zip(*(r.between for r in reports), strict=True)),
        overlap=max(
            (report.overlap for report in reports if report.overlap is not None),
            key=lambda overlap: overlap.slowdowns,
            default=None,
        ),
        host=reports[0].host,
        device=reports[0].device,
    )


def fit_link(samples: Iterable[CollectiveSample], launch_seconds: float, copy_bandwidth: float) -> LinkSpec:
    """Latency, bandwidth and slowdowns that explain timings of collectives best.

    Latency and bandwidth are fitted to all collectives together; a collective's slowdown is the geometric
    mean of the remaining ratios.

    Parameters
    ----------
    samples
        Timings of at least two sizes.
    launch_seconds, copy_bandwidth
        Overhead of a launch and bytes/s (read plus written) of a local copy; both are taken off first.

    Raises
    ------
    CalibrationError
        Fewer than two sizes, or times that do not grow with the size.
    """
    kept = tuple(samples)
    rows = []
    for sample in kept:
        # Coefficients of latency and of seconds per mebibyte, so that both unknowns are of like size.
        coefficients = [
            LinkSpec(latency_seconds=latency, bandwidth=bandwidth).collective_seconds(
                sample.collective, sample.ranks, sample.nbytes
            )
            for latency, bandwidth in ((1.0, 1e300), (0.0, 2.0**20))
        ]
        rows.append(
            [coefficient / _net_seconds(sample, launch_seconds, copy_bandwidth) for coefficient in coefficients]
        )
    matrix = np.array(rows, dtype=np.float64).reshape(-1, 2)
    if np.linalg.matrix_rank(matrix) < 2:
        raise CalibrationError("a link needs collectives of at least two sizes among two or more ranks")
    latency, per_mebibyte = np.linalg.lstsq(matrix, np.ones(len(kept)), rcond=None)[0]
    if latency < 0:
        latency, per_mebibyte = 0.0, matrix[:, 1].sum() / (matrix[:, 1] ** 2).sum()
    if per_mebibyte <= 0:
        raise CalibrationError("collectives of larger tensors were not slower: the machine is too busy, measure again")
    logs: dict[Collective, list[float]] = defaultdict(list)
    for sample, predicted in zip(kept, matrix @ np.array((latency, per_mebibyte)), strict=True):
        logs[sample.collective].append(-float(np.log(predicted)))
    return LinkSpec(
        latency_seconds=float(latency),
        bandwidth=float(2**20 / per_mebibyte),
        slowdown={collective: float(np.exp(np.mean(ratios))) for collective, ratios in logs.items()},
    )


def device_from(report: RankReport, name: str, memory_bytes: int, reserve_bytes: int) -> DeviceSpec:
    """Device whose rates explain the kernels of a report.

    Parameters
    ----------
    report
        Timings; float32 matrix products and pointwise kernels must be among them.
    name
        Its name.
    memory_bytes, reserve_bytes
        Memory of one rank, and what of it torch's tensors cannot have.

    Raises
    ------
    CalibrationError
        A kernel that a device cannot do without was not measured.
    """
    arithmetic: dict[tuple[OperatorClass, str, str], list[KernelSample]] = defaultdict(list)
    moving: dict[str, list[KernelSample]] = defaultdict(list)
    for sample in report.kernels:
        if sample.kind in ARITHMETIC:
            arithmetic[sample.kind, sample.dtype, sample.key].append(sample)
        else:
            for key in {sample.kind.value, sample.name}:
                moving[key].append(sample)
    flops = {
        dtype: _rate(samples, "flops", report.launch_seconds)
        for (kind, dtype, key), samples in arithmetic.items()
        if kind is OperatorClass.MATMUL and not key
    }
    bandwidths = {key: _rate(samples, "nbytes", report.launch_seconds) for key, samples in sorted(moving.items())}
    if "float32" not in flops or OperatorClass.POINTWISE.value not in bandwidths:
        raise CalibrationError("float32 matrix products and pointwise kernels must be measured")
    efficiency = {
        key or kind.value: _rate(samples, "flops", report.launch_seconds) / flops.get(dtype, flops["float32"])
        for (kind, dtype, key), samples in arithmetic.items()
        if key or kind is not OperatorClass.MATMUL
    }
    return DeviceSpec(
        name=name,
        kind=None if report.device is None else "cuda",
        flops=flops,
        memory_bandwidth=bandwidths[OperatorClass.POINTWISE.value],
        launch_seconds=report.launch_seconds,
        memory_bytes=memory_bytes,
        reserve_bytes=reserve_bytes,
        efficiency=efficiency,
        bandwidth_by_class=bandwidths,
    )


def local_cluster(reports: Sequence[RankReport], per_machine: int | None = None) -> ClusterSpec:
    """Cluster ``local-cpu`` from what each rank measured while all ran at once.

    Parameters
    ----------
    reports
        Of all ranks.
    per_machine
        How many of them share a machine; all if None.

    Raises
    ------
    CalibrationError
        The reports do not suffice.
    """
    report, ranks = slowest(reports), per_machine or len(reports)
    assert report.overlap is not None, "processes measure what their collectives take from the computation"
    own, name = physical_memory_bytes() // ranks, f"process of {current_machine().processor}"
    device = device_from(report, name, own, min(PROCESS_RESERVE_BYTES, own // 2))
    copy_bandwidth = _copy_bandwidth(device)
    host = LinkSpec(latency_seconds=device.launch_seconds, bandwidth=copy_bandwidth / 2)
    # One rank has no link inside its machine; that of the host stands for it.
    link = fit_link(report.collectives, device.launch_seconds, copy_bandwidth) if ranks > 1 else host
    machine = current_machine()
    return ClusterSpec(
        name=LOCAL_NAME,
        source=f"Measured on {machine.processor}, {machine.cores} cores, torch {machine.torch_version}, "
        f"{len(reports)} processes at once over gloo (load average {os.getloadavg()[0]:.1f} at the end). "
        "Host link: a copy within this machine's memory.",
        device=device,
        devices_per_node=ranks,
        nodes=1,
        intra_node=link,
        host_link=host,
        overlap=OverlapSpec(computation=report.overlap.slowdowns[0], collectives=report.overlap.slowdowns[1]),
        measured=Measurement(machine=machine, ranks=len(reports), method=METHOD),
    )


def cuda_cluster(reports: Sequence[RankReport], per_machine: int | None = None) -> ClusterSpec:
    """Cluster ``local-cuda`` from what each device measured while all ran at once.

    With one device on a machine nothing is known of links inside it: they are given the speed of the host link.

    Parameters
    ----------
    reports, per_machine
        As for :func:`local_cluster`.

    Raises
    ------
    CalibrationError
        The reports do not suffice.
    """
    report, ranks = slowest(reports), per_machine or len(reports)
    found, host = report.device, report.host
    assert found is not None
    assert host is not None, "devices measure their copies to the host"
    reserve = min(found.outside_bytes + ALLOCATOR_RESERVE_BYTES, found.memory_bytes // 2)
    device = device_from(report, found.name, found.memory_bytes, reserve)
    copied = max(host.out_seconds, host.in_seconds)
    link = LinkSpec(latency_seconds=host.small_seconds, bandwidth=host.nbytes / copied)
    between = "Links between devices are not measured: that of the host stands for them."
    intra = link
    if report.collectives:
        intra = fit_link(report.collectives, device.launch_seconds, _copy_bandwidth(device))
        between = "Collectives over NCCL; what they take from the computation beside them is not measured."
    machine = current_machine("cuda")
    return ClusterSpec(
        name=LOCAL_DEVICE_NAME,
        source=f"Measured on {len(reports)} of {machine.device}, torch {machine.torch_version}. {between} Reserve: "
        f"{found.outside_bytes} bytes outside the allocator, and {ALLOCATOR_RESERVE_BYTES} for what it holds beyond "
        f"tensors. The host starts a kernel in {found.dispatch_seconds:.2g} s, which is not priced.",
        device=device,
        devices_per_node=ranks,
        nodes=1,
        intra_node=intra,
        host_link=link,
        host_link_shared=host.both_seconds > SHARED_LINK * copied,
        measured=Measurement(machine=machine, ranks=len(reports), method=METHOD),
    )


def cluster_of_machines(reports: Sequence[RankReport], per_machine: int, name: str) -> ClusterSpec:
    """Cluster of several machines from what each rank of a job measured while all ran at once.

    The network of a machine is shared by all its ranks, which measured it at once; machines count as equal, each as
    the slowest.

    Parameters
    ----------
    reports
        Of all ranks, machine by machine.
    per_machine
        Ranks of each machine.
    name
        Its name.

    Raises
    ------
    CalibrationError
        The reports do not suffice.
    """
    nodes, report = len(reports) // per_machine, slowest(reports)
    one = (cuda_cluster if report.device is not None else local_cluster)(reports, per_machine)
    network = fit_link(report.between, one.device.launch_seconds, _copy_bandwidth(one.device))
    return one.model_copy(
        update={
            "name": name,
            "source": f"{one.source} {nodes} machines of {per_machine} ranks each.",
            "nodes": nodes,
            "inter_node": network.model_copy(update={"bandwidth": per_machine * network.bandwidth}),
        }
    )


def save_cluster(cluster: ClusterSpec, path: Path) -> None:
    """Write a cluster file atomically; its folder is made where missing."""
    write_text_atomically(path, cluster.model_dump_json(indent=2) + "\n")


def _copy_bandwidth(device: DeviceSpec) -> float:
    return device.bandwidth_by_class.get(OperatorClass.COPY.value, device.memory_bandwidth)


def _slowest(samples: Sequence[_Timed]) -> _Timed:
    return max(samples, key=lambda sample: sample.seconds)


def _net_seconds(sample: CollectiveSample, launch_seconds: float, copy_bandwidth: float) -> float:
    """Seconds without launches and copies, but at least a twentieth of the measured time."""
    copies = 2 * sample.copied_bytes / copy_bandwidth + launch_seconds * bool(sample.copied_bytes)
    return max(sample.seconds - launch_seconds - copies, 0.05 * sample.seconds)


def _rate(samples: Sequence[KernelSample], work: str, launch_seconds: float) -> float:
    total = sum(getattr(sample, work) for sample in samples)
    seconds = sum(max(sample.seconds - launch_seconds, 0.05 * sample.seconds) for sample in samples)
    return float(total / seconds)
