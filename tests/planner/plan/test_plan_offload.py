"""Plans that offload: in the file, in what they promise, in what they say of themselves."""

from __future__ import annotations

import pytest
from support.steps.offload_case import GRAPH, SCHEDULE, CopyPrices, check
from support.steps.plan_case import FINGERPRINTS, MODEL, OPTIONS, RECORD
from support.steps.replay_case import GRAPH as PLAIN_GRAPH
from support.steps.replay_case import SCHEDULE as PLAIN
from support.steps.replay_case import check as check_plain

from formulations.problem.solution import Status
from planner.explanation import offload_section
from planner.plan.document import PlanError, load_plan, make_plan, save_plan, schedule_of, verify_plan

PRICES = CopyPrices({3: 15, 6: 1})
PLANNED = OPTIONS.model_copy(update={"mesh": (1,), "optimizer": "sgd", "memory_bytes": 2000, "host_memory_bytes": 800})


def made(**options):
    report = check(SCHEDULE, seconds=PRICES)
    return make_plan(
        GRAPH,
        SCHEDULE,
        report,
        model=MODEL,
        options=PLANNED.model_copy(update=options),
        fingerprints=FINGERPRINTS,
        bound_ns=None,
        record=RECORD.model_copy(
            update={
                "certificate": RECORD.certificate.model_copy(update={"cross_checks": (), "status": Status.FEASIBLE})
            }
        ),
    )


PLAN = made()


def changed(**host):
    predicted = PLAN.decision.predicted
    predicted = predicted.model_copy(update={"host": predicted.host.model_copy(update=host)})
    return PLAN.model_copy(update={"decision": PLAN.decision.model_copy(update={"predicted": predicted})})


def test_round_trip(tmp_path):
    save_plan(PLAN, tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json") == PLAN
    assert schedule_of(PLAN, GRAPH) == SCHEDULE
    transfers = [step for step in PLAN.decision.schedule.instructions if step.op in ("offload", "prefetch")]
    assert [step.op for step in transfers] == ["offload", "offload", "prefetch", "prefetch"]
    assert transfers[0].model_dump() == {"op": "offload", "source": 3, "target": 6}
    assert verify_plan(PLAN, GRAPH, FINGERPRINTS, seconds=PRICES).ok


def test_what_a_plan_says_of_the_host():
    host = PLAN.decision.predicted.host
    assert host.model_dump() == {
        "peak_bytes": 768,
        "offloaded_bytes": 768,
        "prefetched_bytes": 768,
        "hidden_bytes": 768,
        "stall_ns": 6,
    }
    rows = dict(PLAN.rows())
    assert rows["offloaded tensors"] == "2, 768 B per step"
    assert rows["peak host memory"] == "768 B"
    assert rows["host memory limit"] == "800 B"
    assert rows["copied to and from host"] == "1.50 KiB, 50% of it hidden"
    assert rows["waiting for copies"] == "0.006 µs per step"
    assert dict(made(host_memory_bytes=None).rows())["host memory limit"] == "-"


def test_an_explanation_names_what_is_away_and_what_waits():
    lines = offload_section(GRAPH, SCHEDULE, check(SCHEDULE, seconds=PRICES)).lines
    assert lines == (
        "2 tensors, 768 B a step; at most 768 B of host memory at once",
        "768 B of 1.50 KiB copied both ways are hidden; the computation waits 0.006 µs a step for the rest",
        "512 B  net/forward/aten.cat/3#0",
        "256 B  net/forward/aten.mm/0#0",
    )
    (nothing,) = offload_section(PLAIN_GRAPH, PLAIN, check_plain(PLAIN)).lines
    assert nothing.startswith("nothing")


@pytest.mark.parametrize("name", ["peak_bytes", "offloaded_bytes", "prefetched_bytes", "hidden_bytes", "stall_ns"])
def test_promises_of_the_host_are_held_against_the_replay(name):
    wrong = changed(**{name: 5})
    with pytest.raises(PlanError, match=rf"host: {name} is \d+, 5 predicted"):
        verify_plan(wrong, GRAPH, FINGERPRINTS, seconds=PRICES)
    if name not in ("hidden_bytes", "stall_ns"):
        with pytest.raises(PlanError, match=rf"host: {name} is \d+, 5 predicted"):
            verify_plan(wrong, GRAPH, FINGERPRINTS)


def test_the_host_limit_holds():
    with pytest.raises(PlanError, match="needs 768 bytes on the host, 767 are allowed"):
        made(host_memory_bytes=767)
    options = PLAN.decision.options.model_copy(update={"host_memory_bytes": 767})
    tight = PLAN.model_copy(update={"decision": PLAN.decision.model_copy(update={"options": options})})
    with pytest.raises(PlanError, match="over_host_limit: 768 bytes on the host, 1 more than 767"):
        verify_plan(tight, GRAPH, FINGERPRINTS)
