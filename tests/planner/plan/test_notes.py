"""Notes of a plan."""

from __future__ import annotations

import pytest

from planner.machine.cluster import Measurement, load_cluster
from planner.machine.identity import current_machine
from planner.plan.notes import sharing_notes

PRESET = load_cluster("a100-8-nvlink")


@pytest.mark.parametrize(("measured", "mesh", "noted"), [(2, (2,), False), (2, (2, 2), True), (4, (2,), False)])
def test_a_plan_says_where_processes_share_what_fewer_reached(measured, mesh, noted):
    cluster = PRESET.model_copy(update={"measured": Measurement(machine=current_machine(), ranks=measured)})
    notes = sharing_notes(cluster, mesh)
    assert bool(notes) == noted
    if noted:
        assert "measured with 2 processes at once and the mesh has 4" in notes[0]
        assert "`meshwright calibrate --ranks 4`" in notes[0]


def test_a_preset_is_not_shared():
    assert sharing_notes(PRESET, (2, 4)) == ()
