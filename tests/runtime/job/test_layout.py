"""Ranks of a mesh lie machine by machine, however a launcher numbers them."""

from __future__ import annotations

import os
from unittest.mock import patch

import pytest
import torch.distributed as dist
from support.processes.library_runs import ADAMW, batches, full_tensors
from support.steps.planned_steps import random_plan, real_step

import runtime
from runtime.job import layout
from runtime.job.layout import crossing_axes, layout_note, ranks_by_machine


@pytest.mark.parametrize(
    ("mesh", "per_machine", "crossing"),
    [
        ((2, 2), 2, [0]),
        ((2, 2), 1, [0, 1]),
        ((2, 2), 4, []),
        ((2, 4, 2), 8, [0]),
        ((4, 4), 2, [0, 1]),
        ((2,), 8, []),
        ((3, 2), 4, [0]),
    ],
)
def test_axes_that_cross_machines(mesh, per_machine, crossing):
    assert crossing_axes(mesh, per_machine) == crossing


def test_a_plan_whose_inner_axis_crosses_machines_here_is_noted():
    assert layout_note((2, 8), "a100-2x8-nvlink", 8) == ""
    assert layout_note((2, 2), "a100-2x8-nvlink", 4) == ""
    note = layout_note((2, 8), "a100-2x8-nvlink", 4)
    assert note.startswith("axis 1 of mesh 2x8 crosses machines, which have 4 ranks each here; the plan has it inside")
    assert layout_note((2, 8), "a_cluster_of_a_user", 4) == ""


def test_ranks_that_are_dealt_out_are_ordered_by_machine(monkeypatch):
    """As ``mpirun --map-by node`` numbers them: even ranks on one machine, odd ones on another."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setenv("GROUP_RANK", "0")
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)

    def gathered(found, own):
        assert own == ("0", 0)
        found[:] = [(str(rank % 2), rank // 2) for rank in range(4)]

    monkeypatch.setattr(dist, "all_gather_object", gathered)
    layout._ranks_by_machine.cache_clear()
    try:
        assert ranks_by_machine() == (0, 2, 1, 3)
    finally:
        layout._ranks_by_machine.cache_clear()


def trained_on_rank(plan, dealt_out: bool):
    """Losses and tensors of two steps, as one of four ranks on two machines."""
    rank = dist.get_rank()
    place = {"LOCAL_RANK": str(rank // 2), "GROUP_RANK": str(rank % 2)} if dealt_out else {}
    layout._ranks_by_machine.cache_clear()
    with patch.dict(os.environ, place):
        step = runtime.load(plan, real_step("mlp").module, optimizer=ADAMW, device="cpu")
        losses = [step(batch).item() for batch in batches("mlp", 2)]
        inner = dist.get_process_group_ranks(layout.device_mesh("cpu", (2, 2)).get_group(1))
        found = losses, full_tensors(step.state_dict()), inner, step.groups.coordinate
    layout._ranks_by_machine.cache_clear()
    return found


@pytest.mark.slow
def test_ranks_that_are_dealt_out_train_as_others(four_ranks):
    plan = random_plan("mlp", (2, 2), 1)
    usual = four_ranks.run(trained_on_rank, plan, False)
    dealt = four_ranks.run(trained_on_rank, plan, True)
    assert [entry[2] for entry in dealt] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [entry[3] for entry in dealt] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    for (losses, tensors, *_), (others, same, *_) in zip(usual, dealt, strict=True):
        assert losses == pytest.approx(others, rel=1e-6)
        assert all(tensor.allclose(same[name], rtol=1e-5, atol=1e-6) for name, tensor in tensors.items())
