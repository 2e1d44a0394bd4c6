"""Traces and memory snapshots: complete, with the plan's own figures, and readable by torch's tools."""

from __future__ import annotations

import json
import pickle
import pickletools
from collections import defaultdict

import pytest
import torch
from support.steps.opened_plans import KINDS, opened_plan
from torch.cuda import _memory_viz

from planner.view.snapshot import memory_snapshot, snapshot_bytes
from planner.view.trace import TraceError, chrome_trace, predicted_events, read_trace, trace_beside


def step_of(opened):
    return opened.graph, opened.schedule, opened.time


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_has_every_interval_on_the_row_of_its_stream(kind):
    opened = opened_plan(kind)
    trace = json.loads(json.dumps(chrome_trace(predicted_events(*step_of(opened), process=3))))
    named = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert {event["pid"] for event in trace["traceEvents"]} == {3}
    found = sorted((named[e["tid"]], e["args"]["instruction"], round(1000 * e["ts"])) for e in slices)
    assert found == sorted((i.stream, i.instruction, i.start) for i in opened.intervals)
    assert max(event["ts"] + event["dur"] for event in slices) == pytest.approx(opened.time.total / 1e3)


def test_a_measured_trace_keeps_its_events_and_the_prediction_begins_with_its_step(tmp_path):
    square = torch.ones(32, 32)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU],
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
        on_trace_ready=lambda done: done.export_chrome_trace(str(tmp_path / "trace.json")),
        acc_events=True,
    ) as profiler:
        for _ in range(3):
            square = torch.mm(square, square)
            profiler.step()
    measured = read_trace(tmp_path / "trace.json")
    opened = opened_plan("serial")
    both = trace_beside(*step_of(opened), measured)
    assert both["traceEvents"][: len(measured["traceEvents"])] == measured["traceEvents"]
    assert {key: value for key, value in both.items() if key != "traceEvents"} == {
        key: value for key, value in measured.items() if key != "traceEvents"
    }
    added = both["traceEvents"][len(measured["traceEvents"]) :]
    (process,) = {event["pid"] for event in added}
    assert process not in {event.get("pid") for event in measured["traceEvents"]}
    (step,) = [e for e in measured["traceEvents"] if e.get("ph") == "X" and e["name"].startswith("ProfilerStep#")]
    assert min(event["ts"] for event in added if event["ph"] == "X") == pytest.approx(step["ts"])
    assert any(event.get("name") == "aten::mm" for event in both["traceEvents"])


def test_a_trace_without_steps_begins_with_its_first_event():
    opened = opened_plan("serial")
    measured = {"traceEvents": [{"ph": "X", "name": "a", "pid": 7, "tid": 0, "ts": 50.0, "dur": 1.0}]}
    added = trace_beside(*step_of(opened), measured)["traceEvents"][1:]
    assert {event["pid"] for event in added} == {8}
    assert min(event["ts"] for event in added if event["ph"] == "X") == 50.0


@pytest.mark.parametrize(("content", "message"), [("[1]", "no list"), ("{}", "no list"), ("\x1f\x8b", "not JSON")])
def test_what_is_no_trace_is_refused(tmp_path, content, message):
    file = tmp_path / "trace.json"
    file.write_text(content)
    with pytest.raises(TraceError, match=message):
        read_trace(file)
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "other.json")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mesh", [(2,), (2, 2)])
def test_a_snapshot_reaches_the_peak_of_the_plan_and_no_byte_is_held_twice(kind, mesh):
    opened = opened_plan(kind, mesh=mesh)
    snapshot = memory_snapshot(opened)
    (events,), (segment,) = snapshot["device_traces"], snapshot["segments"]
    alive: dict[int, int] = {}
    by_category: dict[str, int] = defaultdict(int)
    held = highest = 0
    most = dict(by_category)
    for event in events:
        begin, size = event["addr"], event["size"]
        if event["action"] == "alloc":
            assert all(begin + size <= other or other + alive[other] <= begin for other in alive)
            alive[begin] = size
            held += size
            by_category[event["category"]] += size
        elif event["action"] == "free_completed":
            assert alive.pop(begin) == size
            held -= size
            by_category[event["category"]] -= size
        if held > highest:
            highest, most = held, dict(by_category)
    assert highest == opened.plan.peak_bytes
    assert most["parameters"] == sum(t.nbytes for t in opened.report.alive_at_peak if t.category == "parameters")
    assert most["optimizer"] == sum(t.nbytes for t in opened.report.alive_at_peak if t.category == "optimizer")
    assert segment["total_size"] >= highest
    assert segment["allocated_size"] == held
    assert [event["time_us"] for event in events] == sorted(event["time_us"] for event in events)


def test_torch_reads_a_snapshot_and_it_holds_data_alone():
    opened = opened_plan("serial")
    written = snapshot_bytes(opened)
    made = {opcode.name for opcode, _, _ in pickletools.genops(written)}
    assert not made & {"GLOBAL", "STACK_GLOBAL", "REDUCE", "NEWOBJ", "NEWOBJ_EX", "BUILD", "INST", "OBJ"}
    snapshot = pickle.loads(written)
    assert snapshot == memory_snapshot(opened)
    assert "segments: 1" in _memory_viz.segsum(snapshot)  # raises where sizes do not add up
    freed = sum(event["action"] == "free_requested" for event in snapshot["device_traces"][0])
    assert _memory_viz.trace(snapshot).count("\ndel ") == freed > 100
    assert "snapshot.pickle" in _memory_viz.trace_plot(snapshot)
    names = {event["frames"][0]["name"].split(" ")[0] for event in snapshot["device_traces"][0]}
    assert "transformer.h.0.attn.c_attn.weight" in names
