"""Measuring this machine, with every kernel timed briefly."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
import torch

from planner.graph.operator_classes import ARITHMETIC, OperatorClass
from planner.machine.calibration import CalibrationError
from planner.machine.cluster import Collective, load_cluster, local_cluster_path
from planner.machine.identity import CACHE_VARIABLE, current_machine
from runtime.calibration import calibrate as module
from runtime.calibration.calibrate import calibrate, calibrate_devices
from runtime.calibration.kernels import WORKLOADS, kernels
from runtime.calibration.timing import time_call

TINY = replace(
    WORKLOADS["cuda"], device="cpu", rows=32, width=16, words=64, attention=(1, 2, 16, 8), image=(1, 4, 6, 6)
)
"""The kernels of a CUDA device, on a CPU."""


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        cluster = calibrate(seconds_per_kernel=0.01)
        assert load_cluster("local-cpu") == cluster
        assert local_cluster_path().exists()
        yield cluster


@pytest.mark.slow
def test_figures_are_those_of_a_computer(measured):
    device = measured.device
    assert 1e8 < device.flops["float32"] < 1e14
    assert "bfloat16" in device.flops
    assert 1e8 < device.memory_bandwidth < 1e13
    assert 1e-8 < device.launch_seconds < 1e-3
    assert 1e-7 < measured.intra_node.latency_seconds + 2**20 / measured.intra_node.bandwidth < 10
    assert set(measured.intra_node.slowdown) == set(Collective)


def test_every_class_is_measured(measured):
    classes = {kind.value for kind in OperatorClass}
    arithmetic = {kind.value for kind in ARITHMETIC}
    assert set(measured.device.efficiency) == arithmetic - {OperatorClass.MATMUL.value}
    assert classes - arithmetic <= set(measured.device.bandwidth_by_class)


def test_the_file_says_what_it_was_measured_on(measured):
    assert measured.measured.machine == current_machine()
    assert measured.measured.ranks == measured.devices == 2
    assert measured.mesh_links((2, 2))[0].bandwidth == measured.intra_node.bandwidth / 2


@pytest.mark.parametrize("work", [WORKLOADS["cpu"], TINY], ids=["cpu", "cuda"])
def test_kernels_compute_what_they_are_priced_for(work):
    """Inputs and results of a kernel are what its class counts bytes of; shapes agree with the FLOP."""
    for kernel in kernels(work):
        results = kernel.run()
        results = (results,) if isinstance(results, torch.Tensor) else results
        assert all(torch.isfinite(result.float()).all() for result in results), kernel.name
        if kernel.name == "mm":
            inner = (kernel.inputs[0].numel() * kernel.inputs[1].numel() // results[0].numel()) ** 0.5
            assert kernel.flops == 2 * results[0].numel() * inner


@pytest.mark.parametrize("threads", [1, 2])
def test_a_call_is_timed_as_long_as_it_computes(threads, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    calls = []

    def compute():
        calls.append(None)
        end = time.thread_time() + 0.005
        while time.thread_time() < end:
            pass

    measured = time_call(compute, 0.0, torch.device("cpu"))
    assert len(calls) == 4
    assert 0.005 <= measured < (0.006 if threads == 1 else 1.0)


def test_a_device_has_every_class_and_the_kernels_of_its_own():
    found = list(kernels(TINY))
    assert {kernel.kind for kernel in found} == set(OperatorClass)
    keys = {"unaligned_matmul", "efficient_attention_forward", "efficient_attention_backward"}
    assert {kernel.key for kernel in found} - {""} == keys
    assert {kernel.name for kernel in found if kernel.moved} == {"adamw", "adamw_mixed"}
    assert {kernel.inputs[0].dtype for kernel in found if kernel.name == "mm"} == set(TINY.products)


def test_devices_that_are_not_here_are_refused(tmp_path):
    with pytest.raises(CalibrationError, match="2 CUDA devices are to be measured, and this machine has 0"):
        calibrate_devices(2, tmp_path / "local.json")
    assert list(tmp_path.iterdir()) == []


def test_one_rank_cannot_measure_collectives():
    with pytest.raises(CalibrationError, match="ranks must be at least 2 to measure collectives, not 1"):
        calibrate(ranks=1)


@pytest.mark.slow
def test_a_rank_that_fails_is_told_and_nothing_is_written(tmp_path):
    with pytest.raises(CalibrationError, match=r"^a rank failed while measuring: .*float"):
        calibrate(path=tmp_path / "local.json", seconds_per_kernel="long")
    assert list(tmp_path.iterdir()) == []


def test_ranks_that_hang_are_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TIME_LIMIT_SECONDS", 0.1)
    with pytest.raises(CalibrationError, match="2 ranks did not finish measuring within 0 s: use fewer ranks"):
        calibrate(path=tmp_path / "local.json")
    assert list(tmp_path.iterdir()) == []
