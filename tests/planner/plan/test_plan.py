"""Plans: round trips, edits of every field, what they say of themselves."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from support.steps.plan_case import (
    CERTIFICATE,
    MODEL,
    OPTIONS,
    PLAN,
    document,
    edited,
    made,
    verified,
    written,
)
from support.steps.replay_case import ADAMW, GRAPH, SCHEDULE, check

from planner.graph.operator_graph import Operator, OperatorGraph, Phase, Value, ValueRole
from planner.plan.check import memory_over_time
from planner.plan.decision import Decision, canonical_json, decision_digest
from planner.plan.document import (
    SCHEMA_PATH,
    PlanError,
    Record,
    load_plan,
    save_plan,
    schedule_of,
    write_schema,
)
from planner.plan.schedule_document import encode_schedule
from planner.replay.checker import replay


def sealed(content):
    """The document with the digest that fits it."""
    decision = Decision.model_validate_json(json.dumps(content["decision"]))
    return {**content, "digest": decision_digest(decision)}


def leaves(part, path=()):
    """Every scalar of a document by its path."""
    if isinstance(part, dict | list):
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            yield from leaves(value, (*path, key))
    else:
        yield path, part


def other_value(value):
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return f"{'b' if value[:1] == 'a' else 'a'}{value[1:]}"
    return 1


# What no replay can check: labels, and what the planner was asked for where it changes neither bytes nor time.
UNCHECKED = {
    ("created_by",),
    ("model", "source"),
    ("model", "batch"),
    ("model", "sequence"),
    ("model", "dtype"),
    ("model", "seed"),
    ("model", "layers"),
    ("model", "loss_chunks"),
    ("options", "cluster"),
    ("options", "formulation"),
    ("options", "memory_bytes"),
    ("options", "host_memory_bytes"),
    ("options", "reserve_bytes"),
    ("options", "counter_based_random"),
}


def test_round_trip_is_byte_identical(tmp_path):
    first, second = tmp_path / "deep" / "first.json", tmp_path / "second.json"
    save_plan(PLAN, first)
    loaded = load_plan(first)
    save_plan(loaded, second)
    assert loaded == PLAN
    assert first.read_bytes() == second.read_bytes()
    assert [path.name for path in first.parent.iterdir()] == ["first.json"]


def test_decision_depends_on_nothing_that_differs_between_runs():
    other = made(record=Record(certificate=CERTIFICATE.model_copy(update={"seconds": 9.0}), times={"solve": 1.0}))
    assert canonical_json(other.decision) == canonical_json(PLAN.decision)
    assert other.digest == PLAN.digest
    assert made(model=MODEL.model_copy(update={"seed": 1})).digest != PLAN.digest


def test_schedule_comes_back_equal():
    assert schedule_of(PLAN, GRAPH) == SCHEDULE
    assert verified(PLAN).peak_bytes == PLAN.peak_bytes == 1160


def renumbered():
    """The same step as another capture might number it: one more operator in front, values reversed."""
    last = len(GRAPH.values)
    turn = [last - index for index in range(last)]

    def move(indices):
        return tuple(None if index is None else turn[index] for index in indices)

    extra = Operator(0, "net/forward/aten.ones/0", "ones", "ones", "", Phase.FORWARD, (), (0,), False, False, 0)
    operators = [
        replace(operator, index=operator.index + 1, inputs=move(operator.inputs), outputs=move(operator.outputs))
        for operator in GRAPH.operators
    ]
    values = [
        replace(value, index=turn[value.index], producer=None if value.producer is None else value.producer + 1)
        for value in GRAPH.values
    ]
    ones = Value(0, "net/forward/aten.ones/0#0", GRAPH.values[0].spec, ValueRole.ACTIVATION, 0)
    outputs = [replace(o, value=turn[o.value], of=None if o.of is None else turn[o.of]) for o in GRAPH.outputs]
    ordered = sorted((ones, *values), key=lambda value: value.index)
    return OperatorGraph(tuple(ordered), (extra, *operators), move(GRAPH.inputs), tuple(outputs))


def test_operators_are_found_by_identity_not_by_position():
    graph = renumbered()
    schedule = schedule_of(PLAN, graph)
    report = replay(graph, schedule, optimizer=ADAMW)
    assert report.ok
    assert report.peak_bytes == 1160
    assert schedule != SCHEDULE
    assert encode_schedule(graph, schedule) == encode_schedule(GRAPH, SCHEDULE)


def test_missing_operator_and_parameter_are_named():
    operators = list(GRAPH.operators)
    operators[3] = replace(operators[3], identity="net/forward/aten.gelu/3")
    with pytest.raises(PlanError, match=r"runs net/forward/aten\.relu/3, which the traced step lacks"):
        schedule_of(PLAN, replace(GRAPH, operators=tuple(operators)))
    values = list(GRAPH.values)
    values[0] = replace(values[0], name="w3")
    with pytest.raises(PlanError, match="uses parameter w1, which the traced step lacks"):
        schedule_of(PLAN, replace(GRAPH, values=tuple(values)))


def test_every_edit_of_the_decision_is_refused(tmp_path):
    content = document()
    found = list(leaves(content["decision"], ("decision",)))
    assert len(found) > 400
    for path, value in found:
        with pytest.raises(PlanError):
            load_plan(written(tmp_path / "plan.json", edited(content, path, other_value(value))))


@pytest.mark.slow
def test_edits_that_are_sealed_again_fail_the_replay(tmp_path):
    content = document()
    slipped = set()
    for path, value in leaves(content["decision"], ("decision",)):
        changed = edited(content, path, other_value(value))
        try:
            plan = load_plan(written(tmp_path / "plan.json", sealed(changed)))
            verified(plan)
        except ValueError:
            continue
        slipped.add(path[1:])
    assert slipped == UNCHECKED


def test_edit_is_called_an_edit(tmp_path):
    content = edited(document(), ("decision", "predicted", "peak_bytes"), 1)
    path = written(tmp_path / "plan.json", content)
    with pytest.raises(PlanError, match=r"plan\.json was edited in predicted: its decision has digest [0-9a-f]{64}"):
        load_plan(path)


def test_memory_over_time_keeps_the_peak_at_any_resolution():
    report = check(SCHEDULE)
    for points in (2, 3, 10, 38, 1000):
        memory = memory_over_time(report, points)
        total = [sum(amounts) for amounts in zip(*memory.bytes.values(), strict=True)]
        assert len(total) <= points
        assert max(total) == report.peak_bytes
        assert memory.instructions[total.index(max(total))] == report.peak_instruction
        assert memory.instructions[0] == -1
        assert total[0] == 520
    assert memory.instructions == tuple(range(-1, len(SCHEDULE.instructions)))


def test_summary_says_what_the_certificate_says():
    text = PLAN.summary()
    rows = dict(PLAN.rows())
    assert rows["status"] == "optimal"
    assert rows["objective"] == "12.17 µs per step"  # 12 executions at 1000 + index, 4 reshards at 20, 2 updates at 1
    assert rows["gap"] == "0.00 %"
    assert rows["peak memory"] == "1.13 KiB"
    assert rows["memory limit"] == "1.17 KiB for tensors, beside a reserve of 300 B"
    assert rows["recomputed operators"] == "1"
    assert rows["collectives"] == "4"
    assert rows["solver"] == "highs, 250 ms"
    assert rows["bound"] == "12.17 µs, exact by linear program"
    assert rows["second bound"] == "12 µs by bucket_bound, gap 1.38 %"
    assert all(name in text and value in text for name, value in rows.items())
    unlimited = made(bound_ns=None, options=OPTIONS.model_copy(update={"memory_bytes": None}))
    rows = dict(unlimited.rows())
    assert (rows["bound"], rows["gap"], rows["memory limit"]) == ("-", "-", "-")


def test_a_plan_is_one_line():
    assert repr(PLAN) == str(PLAN)
    assert repr(PLAN).endswith("12.17 µs per step, gap 0.00 %, peak 1.13 KiB>")


def test_html_escapes_names():
    plan = made(model=MODEL.model_copy(update={"source": "zoo:<script>&"}))
    html = plan._repr_html_()
    assert "zoo:&lt;script&gt;&amp;" in html
    assert "<script>" not in html


def test_published_schema_is_in_step_with_the_types(tmp_path):
    write_schema(tmp_path / "schema.json")
    assert (tmp_path / "schema.json").read_text() == SCHEMA_PATH.read_text()
    schema = json.loads(SCHEMA_PATH.read_text())
    assert set(schema["required"]) == {"version", "decision", "digest", "record"}
    assert schema["additionalProperties"] is False


def test_file_of_a_large_plan_is_small(tmp_path):
    """Bytes per instruction bound the file: 5,000 instructions must stay below 2 MB."""
    path = tmp_path / "plan.json"
    save_plan(PLAN, path)
    body = len(canonical_json(PLAN.decision.schedule)) + sum(map(len, PLAN.decision.operators))
    assert body / len(SCHEDULE.instructions) < 150
    assert path.stat().st_size < 20_000
