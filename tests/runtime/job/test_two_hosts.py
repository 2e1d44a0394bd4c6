"""Jobs of two machines, which share neither a network stack nor temporary files, over a link of 1 Gbit/s."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.processes.two_hosts import NoNamespacesError, two_hosts
from support.steps.planned_steps import plan_of, random_plan, step_reference

from planner.machine.cluster import Collective, read_cluster
from planner.overlap.serial import SerialSchedule
from planner.overlap.timetable import Room, overlapped
from planner.plan.document import load_plan, save_plan, schedule_of
from planner.schedule.instructions import Wait
from planner.session import PlanningSession, PlanRequest, session_of
from runtime.job.launch import run_plan
from runtime.measure.run_report import RunReport
from runtime.prediction.model_costs import unmeasured_seconds

ROOT = Path(__file__).parents[3]
STEPS = 3


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    try:
        with two_hosts(tmp_path_factory.mktemp("hosts")) as made:
            yield made
    except NoNamespacesError as reason:
        pytest.skip(f"this machine makes no network namespaces: {reason}")


def on_two_hosts(hosts, plan, place, **options):
    path, out = place / "plan.json", place / "report.json"
    save_plan(plan, path)
    command = "run", path, "--steps", STEPS, "--check", "--report", out
    ended = hosts.torchrun("runtime.commands.main", *command, **options)
    assert [node.returncode for node in ended] == [0, 0], [node.stderr[-2000:] for node in ended]
    assert ended[1].stdout == ""  # rank 0 alone prints
    return RunReport.model_validate_json(out.read_text())


@pytest.mark.slow
def test_the_numbers_are_those_of_one_machine(hosts, tmp_path):
    plan = random_plan("vit", (2,), 1)
    here = run_plan(plan, steps=STEPS)
    there = on_two_hosts(hosts, plan, tmp_path)
    assert there.failures() == []
    assert there.loss == here.loss
    assert there.measured_peak_bytes == here.measured_peak_bytes == [plan.peak_bytes] * 2


@pytest.mark.slow
def test_overlapped_transfers_change_no_bit(hosts, tmp_path):
    """Here both hosts have one file system for their temporary files."""
    serial = random_plan("gpt2", (2,), 0)
    session = session_of(serial)
    schedule = schedule_of(serial, session.graph)
    room = Room(session.replay(schedule).profile.total_during, None)
    beside = overlapped(SerialSchedule(session.graph, schedule, session.instruction_costs), room)
    assert any(isinstance(entry, Wait) for entry in beside.instructions)
    plan = plan_of("gpt2", beside, session.instruction_costs)
    there = on_two_hosts(hosts, plan, tmp_path, folder=tmp_path)
    assert there.failures() == []
    assert there.loss == run_plan(serial, steps=STEPS).loss
    assert max(there.measured_peak_bytes) <= plan.peak_bytes


@pytest.mark.slow
def test_the_inner_axis_of_a_mesh_stays_on_a_machine(hosts, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, (ROOT, ROOT / "tests"))))
    out = tmp_path / "mesh.json"
    ended = hosts.torchrun("support.processes.mesh_machines", out, 2, 2, ranks=2)
    assert [node.returncode for node in ended] == [0, 0], [node.stderr[-2000:] for node in ended]
    found = json.loads(out.read_text())
    first, second, third, fourth = found["machines"]
    assert first == second != third == fourth
    assert found["sums"] == [2.0, 1.0]


def on_both(hosts, *command):
    ended = hosts.torchrun("runtime.commands.main", *command)
    assert [node.returncode for node in ended] == [0, 0], [node.stderr[-2000:] for node in ended]
    assert ended[1].stdout == ""  # rank 0 alone prints
    return ended[0].stdout


@pytest.mark.slow
def test_a_job_measures_its_machines_and_a_plan_for_them_what_it_took(hosts, tmp_path, meshwright):
    rack, path, report = tmp_path / "rack.json", tmp_path / "plan.json", tmp_path / "report.json"
    assert "between machines" in on_both(hosts, "calibrate", "--out", rack)
    cluster = read_cluster(rack)
    assert (cluster.name, cluster.nodes, cluster.devices_per_node) == ("rack", 2, 1)
    gathering = cluster.inter_node.collective_seconds(Collective.ALL_GATHER, 2, 2**24)
    assert 0.5 < gathering / (2**23 / 0.125e9) < 4.0  # half of it travels, each way at once; gloo is no ring
    session = PlanningSession(step_reference("gpt2"), cluster, (2,))
    save_plan(session.plan(PlanRequest(time_limit=2.0)), path)
    run = ("run", path, "--steps", STEPS, "--allow-code", "--profile", tmp_path / "trace.json", "--cluster", rack)
    assert "by kind" in on_both(hosts, *run, "--report", report)
    outcome = meshwright("calibrate", "--plan", path, "--report", report, "--out", rack, "--allow-code")
    assert outcome.code == 0, outcome.err
    plan = load_plan(path)
    measured = session_of(plan, read_cluster(rack), allow_code=True)
    assert unmeasured_seconds(measured, schedule_of(plan, measured.graph)) == 0.0


def test_a_machine_without_namespaces_gives_the_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(NoNamespacesError, match="ip and tc"), two_hosts(tmp_path):
        pass
