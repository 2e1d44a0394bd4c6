"""Profiles: what ran beside what was predicted, in lines that add up, and as a trace."""

from __future__ import annotations

import json
from itertools import pairwise

import numpy as np
import pytest
from support.steps.planned_steps import random_plan

from planner.common.units import format_seconds
from planner.plan.document import schedule_of
from planner.replay.clocks import step_time
from planner.replay.memory import LocalBytes
from planner.schedule.instructions import Compute, Reshard, Update
from planner.session import session_of
from planner.view.naming import VIEW
from runtime.commands.tables.profile import profile_tables
from runtime.measure.profile import WAITING, profile_of


@pytest.fixture(scope="module")
def planned():
    plan = random_plan("mlp", (2,), 0)
    session = session_of(plan)
    schedule = schedule_of(plan, session.graph)
    time, _ = step_time(session.graph, schedule, session.instruction_costs, LocalBytes(session.graph, session.mesh))
    return plan, session, schedule, time


def _times(schedule, rank):
    return [1000 * (at + 1) + rank * (at % 7) for at in range(len(schedule.instructions))]


def test_lines_add_up_to_the_mean_of_the_ranks(planned):
    _, session, schedule, predicted = planned
    measured = [_times(schedule, rank) for rank in range(2)]
    profile = profile_of(session.graph, schedule, measured, predicted)
    lines = profile.by_kind()
    assert lines[-1].name == WAITING
    total = np.array(measured).mean(axis=0).sum()
    assert sum(line.measured_ns for line in lines) == pytest.approx(total, abs=len(schedule.instructions))
    assert sum(line.count for line in lines) == len(schedule.instructions)
    assert sum(line.measured_ns for line in profile.by_module()) == pytest.approx(total - profile.waiting_ns, abs=200)


def test_predictions_are_those_of_the_plan(planned):
    plan, session, schedule, predicted = planned
    profile = profile_of(session.graph, schedule, [_times(schedule, 0)], predicted)
    assert sum(line.predicted_ns for line in profile.by_kind()) == plan.decision.predicted.objective_ns
    unpriced = profile_of(session.graph, schedule, [_times(schedule, 0)], None)
    assert sum(line.predicted_ns for line in unpriced.by_kind()) == 0
    assert all(line.name != WAITING for line in unpriced.by_kind()), "one rank waits for nobody"


def test_a_collective_takes_as_long_as_on_the_rank_that_came_last(planned):
    _, session, schedule, predicted = planned
    reshards = [at for at, entry in enumerate(schedule.instructions) if isinstance(entry, Reshard)]
    computes = [at for at, entry in enumerate(schedule.instructions) if isinstance(entry, Compute)]
    assert reshards, "a plan of two ranks communicates"
    late, early = (np.array(_times(schedule, 0)) for _ in range(2))
    late[computes[0]] += 5_000
    early[reshards[0]] += 5_000
    profile = profile_of(session.graph, schedule, [late.tolist(), early.tolist()], predicted)
    assert profile.own[reshards[0]] == late[reshards[0]]
    assert profile.own[computes[0]] == early[computes[0]] + 2_500
    assert profile.waiting_ns == 2_500


def test_the_trace_has_a_process_for_the_prediction_and_one_for_every_rank(planned, tmp_path):
    plan, session, schedule, predicted = planned
    profile = profile_of(session.graph, schedule, [_times(schedule, 0), _times(schedule, 1)], predicted)
    profile.save_trace(tmp_path / "trace.json")
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {0: "predicted", 1: "rank 0, measured", 2: "rank 1, measured"}
    slices = [event for event in events if event["ph"] == "X"]
    rows = [[event for event in slices if event["pid"] == process] for process in names]
    assert sum(event["dur"] for event in rows[0]) == pytest.approx(plan.decision.predicted.objective_ns / 1e3)
    for row in rows:
        for before, after in pairwise(sorted(row, key=lambda event: event["ts"])):
            assert after["ts"] >= before["ts"] + before["dur"] - 1e-3
    updates = sum(isinstance(entry, Update) for entry in schedule.instructions)
    assert sum(event["name"].startswith("update ") for event in rows[1]) == updates
    assert any(event["cat"] == VIEW for event in rows[1])


def test_tables_end_with_the_whole_step(planned):
    plan, session, schedule, predicted = planned
    profile = profile_of(session.graph, schedule, [_times(schedule, 0)], predicted)
    for table in profile_tables(profile):
        heading, predicted = (list(table.columns[at].cells) for at in (0, 2))
        assert heading[-1] == "step"
        assert predicted[-1] == format_seconds(plan.decision.predicted.objective_ns * 1e-9)
