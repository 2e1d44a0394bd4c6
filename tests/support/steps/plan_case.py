"""A plan of the two-layer step, and its file as a document that tests edit."""

from __future__ import annotations

import json

from support.steps.replay_case import GRAPH, RULES, SCHEDULE, Prices, check

from formulations.problem.solution import Proof, Status
from planner.plan.decision import canonical_json
from planner.plan.document import (
    Certificate,
    CrossCheck,
    Fingerprints,
    PlannedModel,
    PlanOptions,
    Record,
    make_plan,
    verify_plan,
)

MODEL = PlannedModel(source="zoo:two_layers", batch=16, sequence=1, dtype="float32", seed=0)
OPTIONS = PlanOptions(
    cluster="two", mesh=(2,), optimizer="adamw", formulation="kiwi_reduced", memory_bytes=1500, reserve_bytes=300
)
FINGERPRINTS = Fingerprints(graph="a" * 64, cluster="b" * 64, rules="c" * 64)
CERTIFICATE = Certificate(
    solver="highs",
    status=Status.OPTIMAL,
    seconds=0.25,
    proof=Proof.EXACT,
    method="linear program",
    cross_checks=(CrossCheck(solver="bucket_bound", status=Status.BOUND_ONLY, bound_ns=12_000, seconds=0.01),),
)
RECORD = Record(certificate=CERTIFICATE, times={"trace": 0.5}, hardware={"processor": "a"})


def made(**changes):
    report = check(SCHEDULE, seconds=Prices(), limit=1200)
    given_ = {
        "model": MODEL,
        "options": OPTIONS,
        "fingerprints": FINGERPRINTS,
        "bound_ns": report.total_quanta,
        "record": RECORD,
    }
    return make_plan(GRAPH, SCHEDULE, report, **{**given_, **changes})


PLAN = made()


def verified(plan, **changes):
    options = {"seconds": Prices(), "allowed": RULES.__getitem__, "devices": 2}
    return verify_plan(plan, GRAPH, FINGERPRINTS, **{**options, **changes})


def document():
    return json.loads(canonical_json(PLAN))


def written(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def edited(content, path, value):
    result = json.loads(json.dumps(content))
    part = result
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = value
    return result
