"""From timings to a cluster: known figures are found again."""

from __future__ import annotations

import pytest

from planner.graph.operator_classes import OperatorClass
from planner.machine import calibration
from planner.machine.calibration import (
    CalibrationError,
    CollectiveSample,
    FoundDevice,
    HostSample,
    KernelSample,
    OverlapSample,
    RankReport,
    cluster_of_machines,
    cuda_cluster,
    device_from,
    fit_link,
    local_cluster,
    save_cluster,
    slowest,
)
from planner.machine.cluster import ClusterError, Collective, HostCopies, LinkSpec, load_cluster
from planner.machine.identity import current_machine, physical_memory_bytes

LAUNCH, COPY = 2e-6, 4e10
TRUE = LinkSpec(latency_seconds=3e-5, bandwidth=2e9)
SIZES = (2**10, 2**16, 2**20, 2**24)


def collective_samples(link, ranks=4, sizes=SIZES):
    for collective in Collective:
        for nbytes in sizes:
            copied = nbytes if collective is Collective.ALL_REDUCE else 0
            seconds = link.collective_seconds(collective, ranks, nbytes) + LAUNCH
            seconds += 2 * copied / COPY + LAUNCH * bool(copied)
            yield CollectiveSample(
                collective=collective, ranks=ranks, nbytes=nbytes, copied_bytes=copied, seconds=seconds
            )


def kernel(name, kind, seconds, flops=0, nbytes=0, dtype="float32"):
    return KernelSample(name=name, kind=kind, dtype=dtype, flops=flops, nbytes=nbytes, seconds=seconds + LAUNCH)


KERNELS = (
    kernel("mm", OperatorClass.MATMUL, 1e-3, flops=10**8),
    kernel("mm", OperatorClass.MATMUL, 3e-3, flops=10**8),
    kernel("mm", OperatorClass.MATMUL, 1e-3, flops=10**9, dtype="bfloat16"),
    kernel("convolution", OperatorClass.CONVOLUTION, 1e-3, flops=10**8),
    kernel("add", OperatorClass.POINTWISE, 1e-3, nbytes=10**7),
    kernel("tanh", OperatorClass.TRANSCENDENTAL, 1e-2, nbytes=10**7),
    kernel("gelu", OperatorClass.TRANSCENDENTAL, 1e-3, nbytes=10**7),
    kernel("clone", OperatorClass.COPY, 1e-3, nbytes=4 * 10**7),
)


def report(scale=1.0, kernels=KERNELS, overlap=(1.0, 1.3, 2.0, 1.8)):
    alone, beside, collective_alone, collective_beside = overlap
    return RankReport(
        launch_seconds=LAUNCH,
        kernels=tuple(k.model_copy(update={"seconds": k.seconds * scale}) for k in kernels),
        collectives=tuple(collective_samples(TRUE, ranks=2)),
        overlap=OverlapSample(
            computation_alone=alone,
            computation_beside=beside,
            collective_alone=collective_alone,
            collective_beside=collective_beside,
        ),
    )


def test_a_link_is_found_again():
    link = fit_link(collective_samples(TRUE), LAUNCH, COPY)
    assert link.latency_seconds == pytest.approx(TRUE.latency_seconds, rel=1e-6)
    assert link.bandwidth == pytest.approx(TRUE.bandwidth, rel=1e-6)
    assert link.slowdown == pytest.approx(dict.fromkeys(Collective, 1.0))


def test_a_collective_that_is_no_ring_is_slowed_down_alone():
    slow = TRUE.model_copy(update={"slowdown": {Collective.REDUCE_SCATTER: 2.0}})
    link = fit_link(collective_samples(slow), LAUNCH, COPY)
    ratio = link.slowdown[Collective.REDUCE_SCATTER] / link.slowdown[Collective.ALL_GATHER]
    assert ratio == pytest.approx(2.0, rel=1e-6)
    for collective in Collective:
        for nbytes in SIZES:
            fitted = link.collective_seconds(collective, 4, nbytes)
            assert fitted == pytest.approx(slow.collective_seconds(collective, 4, nbytes), rel=0.05)


def test_latency_is_never_negative():
    samples = [
        CollectiveSample(collective=Collective.ALL_GATHER, ranks=2, nbytes=size, copied_bytes=0, seconds=time)
        for size, time in ((2**20, 1e-3), (2**21, 2.5e-3), (2**22, 6e-3))
    ]
    link = fit_link(samples, 0.0, COPY)
    assert link.latency_seconds == 0
    assert 2**22 / 2 / 6e-3 < link.bandwidth < 2**20 / 2 / 1e-3


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        ([], "at least two sizes"),
        (list(collective_samples(TRUE, sizes=(2**10,))), "at least two sizes"),
        (list(collective_samples(TRUE, ranks=1)), "two or more ranks"),
        (
            [
                CollectiveSample(collective=Collective.ALL_GATHER, ranks=2, nbytes=n, copied_bytes=0, seconds=t)
                for n, t in ((2**10, 1.0), (2**20, 0.1))
            ],
            "the machine is too busy, measure again",
        ),
    ],
)
def test_timings_that_give_no_link_are_refused(samples, message):
    with pytest.raises(CalibrationError, match=message):
        fit_link(samples, LAUNCH, COPY)


def test_rates_are_work_over_time():
    device = device_from(report(), "abacus", 2**32, 2**29)
    assert device.flops == pytest.approx({"float32": 5e10, "bfloat16": 1e12})
    assert device.efficiency == pytest.approx({"convolution": 2.0})
    assert device.memory_bandwidth == pytest.approx(1e10)
    assert device.bandwidth_by_class["tanh"] == pytest.approx(1e9)
    assert device.bandwidth_by_class["gelu"] == pytest.approx(1e10)
    assert device.bandwidth_by_class["transcendental"] == pytest.approx(2e7 / 1.1e-2)
    assert (device.memory_bytes, device.launch_seconds) == (2**32, LAUNCH)


@pytest.mark.parametrize("missing", [OperatorClass.MATMUL, OperatorClass.POINTWISE])
def test_what_a_device_cannot_do_without_must_be_measured(missing):
    kernels = tuple(k for k in KERNELS if k.kind is not missing)
    with pytest.raises(CalibrationError, match="must be measured"):
        device_from(report(kernels=kernels), "abacus", 2**32, 2**29)


def test_the_slowest_rank_sets_the_pace():
    assert slowest([report(), report(scale=2.0), report(scale=0.5)]).kernels == report(scale=2.0).kernels


def test_what_computation_and_collectives_take_from_each_other():
    cluster = local_cluster([report(), report(overlap=(1.0, 1.5, 2.0, 2.5))])
    assert cluster.overlap.computation == pytest.approx(1.5)
    assert cluster.overlap.collectives == pytest.approx(1.25)
    assert local_cluster([report()] * 2).overlap.collectives == 1.0  # none is faster beside the other


def device_report(collectives=(), both=1.1, own=()):
    base = report()
    return base.model_copy(
        update={
            "overlap": None,
            "kernels": (*base.kernels, *own),
            "collectives": tuple(collectives),
            "host": HostSample(
                nbytes=10**9, out_seconds=0.02, in_seconds=0.025, both_seconds=0.025 * both, small_seconds=1e-5
            ),
            "device": FoundDevice(
                name="NVIDIA Abacus", memory_bytes=80 * 10**9, outside_bytes=10**9, dispatch_seconds=5e-6
            ),
        }
    )


def test_a_cluster_of_devices_is_no_cluster_of_processes(monkeypatch, tmp_path):
    here = current_machine().model_copy(update={"device": "NVIDIA Abacus, driver 1, CUDA 13.0"})
    monkeypatch.setattr(calibration, "current_machine", lambda kind: here)
    cluster = cuda_cluster([device_report()])
    assert (cluster.name, cluster.device_kind, cluster.is_shared) == ("local-cuda", "cuda", False)
    assert cluster.measured.machine.device == here.device
    assert cluster.device.memory_bytes == 80 * 10**9
    assert cluster.device.reserve_bytes == 10**9 + calibration.ALLOCATOR_RESERVE_BYTES
    assert cluster.host_link.bandwidth == pytest.approx(4e10)
    assert cluster.host_copies is HostCopies.BOTH_WAYS
    assert "Links between devices are not measured" in cluster.source
    with pytest.raises(ClusterError, match="mesh 2 has 2 devices but cluster local-cuda has 1"):
        cluster.device_for((2,))
    save_cluster(cluster, tmp_path / "file.json")
    assert load_cluster(str(tmp_path / "file.json")) == cluster


def test_devices_that_are_connected_have_a_link_and_share_one_to_the_host(monkeypatch):
    monkeypatch.setattr(calibration, "current_machine", lambda kind: current_machine())
    both = [device_report(collective_samples(TRUE, ranks=2), both=1.9)] * 2
    cluster = cuda_cluster(both)
    assert cluster.devices == 2
    assert cluster.intra_node.bandwidth == pytest.approx(TRUE.bandwidth, rel=1e-6)
    assert cluster.device_for((2,)) == cluster.device_for((1,)) == cluster.device
    assert cluster.host_copies is HostCopies.TAKE_TURNS


NETWORK = LinkSpec(latency_seconds=2e-4, bandwidth=1e8)


def across(base, ranks=2):
    return base.model_copy(update={"between": tuple(collective_samples(NETWORK, ranks))})


def test_ranks_of_a_machine_share_its_network(tmp_path):
    cluster = cluster_of_machines([across(report(), 3)] * 6, 2, "rack")
    assert (cluster.name, cluster.nodes, cluster.devices_per_node, cluster.is_shared) == ("rack", 3, 2, False)
    assert cluster.device.memory_bytes == physical_memory_bytes() // 2
    assert cluster.intra_node.bandwidth == pytest.approx(TRUE.bandwidth, rel=1e-6)
    assert cluster.inter_node.bandwidth == pytest.approx(2 * NETWORK.bandwidth, rel=1e-6)
    assert cluster.inter_node.latency_seconds == pytest.approx(NETWORK.latency_seconds, rel=1e-6)
    assert cluster.mesh_links((3, 2))[0].bandwidth == pytest.approx(NETWORK.bandwidth, rel=1e-6)
    assert cluster.measured.ranks == 6
    assert "3 machines of 2 ranks each" in cluster.source
    save_cluster(cluster, tmp_path / "rack.json")
    assert load_cluster(str(tmp_path / "rack.json")) == cluster


def test_machines_of_one_rank_have_their_network_alone():
    alone = across(report()).model_copy(update={"collectives": ()})
    cluster = cluster_of_machines([alone] * 2, 1, "pair")
    assert cluster.device.memory_bytes == physical_memory_bytes()
    (link,) = cluster.mesh_links((2,))
    assert link.bandwidth == pytest.approx(NETWORK.bandwidth, rel=1e-6)
    assert link.collective_seconds(Collective.ALL_REDUCE, 2, 10**6) == pytest.approx(
        NETWORK.collective_seconds(Collective.ALL_REDUCE, 2, 10**6), rel=1e-6
    )


def test_machines_of_devices_are_measured_alike(monkeypatch):
    monkeypatch.setattr(calibration, "current_machine", lambda kind: current_machine())
    cluster = cluster_of_machines([across(device_report(collective_samples(TRUE, ranks=2)))] * 4, 2, "rack")
    assert (cluster.device_kind, cluster.nodes, cluster.devices) == ("cuda", 2, 4)
    assert cluster.intra_node.bandwidth == pytest.approx(TRUE.bandwidth, rel=1e-6)
    assert cluster.inter_node.bandwidth == pytest.approx(2 * NETWORK.bandwidth, rel=1e-6)


def test_a_kernel_with_a_key_has_a_rate_of_its_own(monkeypatch):
    monkeypatch.setattr(calibration, "current_machine", lambda kind: current_machine())
    own = [
        kernel("mm", OperatorClass.MATMUL, 1e-3, flops=10**8, dtype="bfloat16").model_copy(
            update={"key": "unaligned_matmul"}
        )
    ]
    device = cuda_cluster([device_report(own=own)]).device
    assert device.flops["bfloat16"] == pytest.approx(1e12)
    assert device.efficiency == pytest.approx({"convolution": 2.0, "unaligned_matmul": 0.1})


def test_a_local_cluster_is_this_machines(tmp_path):
    cluster = local_cluster([report(), report()])
    assert cluster.name == "local-cpu"
    assert cluster.measured.machine == current_machine()
    assert cluster.measured.ranks == cluster.devices == 2
    assert cluster.device.memory_bytes == physical_memory_bytes() // 2
    assert cluster.intra_node.bandwidth == pytest.approx(TRUE.bandwidth, rel=1e-6)
    assert cluster.host_link.bandwidth == pytest.approx(2e10)
    save_cluster(cluster, tmp_path / "deep" / "file.json")
    assert load_cluster(str(tmp_path / "deep" / "file.json")) == cluster
