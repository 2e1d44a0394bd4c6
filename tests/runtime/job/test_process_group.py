"""Devices and settings of a rank on CUDA, as far as a machine without one can tell: torch's calls are recorded."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from planner.layers.plan.document import LayerPlan, LayerSettings, PlannedMachine, StagePlan
from planner.machine.cluster import Measurement
from planner.machine.identity import current_machine
from planner.plan.decision import PlannedModel
from planner.plan.document import load_plan
from runtime.job import device_memory, planned_device, process_group
from runtime.job.device_memory import check_device_memory
from runtime.job.planned_device import calibration_note, check_kind, device_of_run, print_calibration_note
from runtime.job.process_group import ALLOCATOR_SETTING, LaunchError, enter, rank_device, round_as_float32

PLAN = Path(__file__).parents[2] / "fixtures" / "plans" / "kiwi_chain.json"


@pytest.fixture
def machine(monkeypatch):
    """A machine with some CUDA devices, of which the process sees so many, as rank 1 of its local ranks."""

    def seen(devices: int, local_ranks: int, visible: str | None = None) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: devices)
        monkeypatch.setenv("LOCAL_RANK", "1")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(local_ranks))
        if visible is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return seen


def test_a_rank_has_the_device_of_its_number_or_the_only_one_that_it_is_shown(machine):
    machine(4, 4)
    assert rank_device("cuda") == torch.device("cuda", 1)
    assert rank_device("cpu") == torch.device("cpu")
    machine(1, 4, visible="3")
    assert rank_device("cuda") == torch.device("cuda", 0)


@pytest.mark.parametrize("wanted", ["cuda", "tpu"])
def test_too_few_devices_are_refused(machine, wanted):
    machine(1 if wanted == "cuda" else 4, 2)
    with pytest.raises(LaunchError, match=r"'(cuda|tpu)': this machine has \d CUDA devices for 2 ranks; use"):
        rank_device(wanted)


def test_a_group_on_cuda_is_bound_to_its_device_before_anything_is_allocated(monkeypatch):
    calls = []
    monkeypatch.delenv(ALLOCATOR_SETTING, raising=False)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: calls.append((device, os.environ[ALLOCATOR_SETTING])))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **named: calls.append((backend, named)))
    device = torch.device("cuda", 1)
    enter(device)
    monkeypatch.delenv(ALLOCATOR_SETTING)
    assert calls == [
        (device, "expandable_segments:True"),
        ("cpu:gloo,cuda:nccl", {"timeout": process_group.COLLECTIVE_TIMEOUT, "device_id": device}),
    ]


def test_a_comparison_multiplies_in_32_bits():
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]
    try:
        for backend in backends:
            backend.allow_tf32 = True
        round_as_float32()
        assert [backend.allow_tf32 for backend in backends] == [False, False]
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.allow_tf32 = value


def test_a_plan_for_more_memory_than_the_device_has_is_refused(monkeypatch):
    monkeypatch.setattr(device_memory, "physical_memory_bytes", lambda: 8 * 2**30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    check_device_memory(2 * 2**30, torch.device("cpu"))
    with pytest.raises(LaunchError, match=r"holds 3.00 GiB.*shared by 4 ranks, has 8.00 GiB.*--memory 2.00 GiB or"):
        check_device_memory(3 * 2**30, torch.device("cpu"))
    found = SimpleNamespace(total_memory=40 * 2**30, name="NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    check_device_memory(40 * 2**30, torch.device("cuda", 1))
    with pytest.raises(LaunchError, match=r"40.00 GiB of tensors on a device beside a reserve of 1.00 GiB; cuda:1"):
        check_device_memory(40 * 2**30, torch.device("cuda", 1), 2**30)
    with pytest.raises(LaunchError, match=r"cuda:1 \(NVIDIA A100\) has 40.00 GiB"):
        check_device_memory(41 * 2**30, torch.device("cuda", 1))


def planned_for(plan, **options):
    changed = plan.decision.options.model_copy(update=options)
    return plan.model_copy(update={"decision": plan.decision.model_copy(update={"options": changed})})


def test_a_run_is_on_the_kind_of_device_that_its_plan_is_for(monkeypatch):
    plan = load_plan(PLAN)
    assert device_of_run(None, plan) == "cpu"
    on_cuda = planned_for(plan, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(LaunchError, match=r"for CUDA devices of cluster v100-8-nvlink, and none is.*--device cpu"):
        device_of_run(None, on_cuda)
    with pytest.raises(LaunchError, match="for CUDA devices"):
        check_kind(on_cuda, "cpu")
    assert device_of_run("cpu", on_cuda) == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_of_run(None, on_cuda) == "cuda"
    assert device_of_run(None, plan) == "cpu"


def test_a_calibration_is_compared_with_this_machine(monkeypatch, capsys):
    plan = load_plan(PLAN)
    assert calibration_note(plan) == ""
    measured = Measurement(machine=current_machine(), ranks=2).model_dump_json().encode()
    here = plan.decision.fingerprints.model_copy(update={"calibration": hashlib.sha256(measured).hexdigest()})
    plan = plan.model_copy(update={"decision": plan.decision.model_copy(update={"fingerprints": here})})
    assert calibration_note(plan) == ""
    elsewhere = current_machine().model_copy(update={"processor": "an abacus"})
    monkeypatch.setattr(planned_device, "current_machine", lambda kind: elsewhere)
    assert "measured on another machine than this one (an abacus" in calibration_note(plan)
    for rank, lines in ((1, 0), (0, 1)):  # however ranks are started, the first says it
        monkeypatch.setattr(planned_device.dist, "get_rank", lambda rank=rank: rank)
        print_calibration_note(plan)
        assert capsys.readouterr().err.count("meshwright: note: the plan's costs were measured on another") == lines


def test_plans_of_layers_say_what_they_are_for(monkeypatch):
    model = PlannedModel(source="hf:gpt2", batch=2, sequence=8, dtype="float32", seed=0)
    old = LayerPlan(model=model, devices=1, stages=(StagePlan(layers=(LayerSettings(name="head"),)),))
    assert "machine" not in json.loads(old.model_dump_json())
    assert (device_of_run(None, old), calibration_note(old)) == ("cpu", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    on_cuda = old.model_copy(update={"machine": PlannedMachine(cluster="v100-8-nvlink", device="cuda")})
    with pytest.raises(LaunchError, match=r"for CUDA devices of cluster v100-8-nvlink, and none is.*--device cpu"):
        device_of_run(None, on_cuda)
    measured = Measurement(machine=current_machine(), ranks=4).fingerprint()
    here = PlannedMachine(cluster="local-cpu", device="cpu", calibration=measured)
    assert calibration_note(old.model_copy(update={"machine": here})) == ""
    elsewhere = here.model_copy(update={"calibration": "0" * 64})
    note = calibration_note(old.model_copy(update={"machine": elsewhere}))
    assert "measured on another machine than this one" in note
