"""Notes of a plan."""

from __future__ import annotations

import json

import pytest
from support.steps.planned_steps import CONFIGURATIONS

from formulations.step.training_step import StepDecision
from planner.machine.cluster import Measurement, load_cluster
from planner.machine.identity import current_machine
from planner.models.references import ModelReference
from planner.plan.notes import planning_notes, sharing_notes, undivided_operators
from planner.session import PlanningSession

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


def test_what_does_not_divide_is_one_note_with_the_total(tmp_path):
    odd = CONFIGURATIONS["gpt2"] | {"vocab_size": 127, "n_embd": 36, "n_head": 3}
    file = tmp_path / "config.json"
    file.write_text(json.dumps(odd))
    here = PlanningSession(ModelReference(f"hf:{file}", batch=3, sequence=15, dropout=0.0), "a100-8-nvlink", (2,))
    schedule = here.schedule(StepDecision((0,) * len(here.space.nodes), {}))
    report, costs = here.space.report, here.instruction_costs
    found = undivided_operators(here.graph, schedule, report, costs)
    assert len(found) > 3
    assert [entry.seconds for entry in found] == sorted((entry.seconds for entry in found), reverse=True)
    assert {entry.target: entry.count for entry in found}.items() <= report.not_dividing.items()
    notes = [note for note in planning_notes(here.graph, schedule, report, costs) if "does not divide" in note]
    (note,) = notes
    assert note.startswith(f"{sum(entry.count for entry in found)} operators: a dimension does not divide")
    assert found[0].target in note
    assert f"and {len(found) - 3} more kinds, which explain lists" in note
    assert note.endswith("The inputs have 3 rows: a batch that is a multiple of 2 divides by every mesh axis")
