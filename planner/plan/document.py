"""Plans: made from a replayed schedule, written, read back and checked.

:class:`Plan` and its parts are in :mod:`planner.plan.format`; ``schemas/plan-v2.json`` is their published
schema.
"""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from formulations.problem.files import write_text_atomically
from planner.common.plan_error import PlanError
from planner.graph.operator_graph import OperatorGraph
from planner.plan.check import certificate_contradiction, host_prediction, memory_over_time, verify_plan
from planner.plan.decision import (
    Decision,
    Fingerprints,
    PlannedModel,
    PlanOptions,
    Predicted,
    canonical_json,
    decision_digest,
    part_digests,
)
from planner.plan.format import PLAN_VERSION, Certificate, CrossCheck, Plan, Record, plan_schema
from planner.plan.kept_pins import broken_pins
from planner.plan.schedule_document import decode_schedule, encode_schedule
from planner.replay.report import ReplayReport
from planner.schedule.instructions import Schedule

__all__ = [
    "SCHEMA_PATH",
    "Certificate",
    "CrossCheck",
    "Fingerprints",
    "Plan",
    "PlanError",
    "PlanOptions",
    "PlannedModel",
    "Record",
    "certificate_contradiction",
    "load_plan",
    "make_plan",
    "save_plan",
    "schedule_of",
    "verify_plan",
    "write_schema",
]

SCHEMA_PATH = Path(__file__).parent / "schemas" / f"plan-v{PLAN_VERSION}.json"
"""The published schema of plan files."""


def make_plan(
    graph: OperatorGraph,
    schedule: Schedule,
    report: ReplayReport,
    *,
    model: PlannedModel,
    options: PlanOptions,
    fingerprints: Fingerprints,
    bound_ns: int | None,
    record: Record,
) -> Plan:
    """Plan of a schedule whose replay has costs and no violations.

    Parameters
    ----------
    graph, schedule, report
        The traced step, its schedule, and the schedule's replay: its total and its bytes are the prediction.
    model, options, fingerprints
        What was planned.
    bound_ns
        Proven lower bound in nanoseconds, or None.
    record
        How the plan was found.

    Raises
    ------
    PlanError
        The replay found violations, more memory than is allowed, or had no costs; the schedule does not keep a pin;
        or the solvers contradict one another.
    """
    if report.violations:
        raise PlanError(f"the schedule is no correct step: {report.violations[0]}")
    if options.limit_bytes is not None and report.peak_bytes > options.limit_bytes:
        raise PlanError(f"the schedule needs {report.peak_bytes} bytes, {options.limit_bytes} are allowed")
    for broken in broken_pins(graph, schedule, options.pins):
        raise PlanError(f"the schedule does not keep a pin: {broken}")
    host_limit = options.host_memory_bytes
    if host_limit is not None and report.host.peak_bytes > host_limit:
        raise PlanError(f"the schedule needs {report.host.peak_bytes} bytes on the host, {host_limit} are allowed")
    if report.total_quanta is None:
        raise PlanError("the schedule was replayed without costs: a plan predicts the time of a step")
    predicted = Predicted(
        objective_ns=report.total_quanta,
        bound_ns=bound_ns,
        peak_bytes=report.peak_bytes,
        peak_instruction=report.peak_instruction,
        memory=memory_over_time(report),
        host=host_prediction(report),
    )
    contradiction = certificate_contradiction(record.certificate, predicted)
    if contradiction:
        raise PlanError(f"no plan, because the solvers contradict one another: {contradiction}")
    encoded = encode_schedule(graph, schedule)
    decision = Decision(
        created_by=f"meshwright {version('meshwright')}",
        model=model,
        options=options,
        fingerprints=fingerprints,
        operators=encoded.operators,
        values=encoded.values,
        schedule=encoded.schedule,
        predicted=predicted,
        random_targets=graph.random_targets,
    )
    return Plan(
        version=PLAN_VERSION,
        decision=decision,
        digest=decision_digest(decision),
        part_digests=part_digests(decision),
        record=record,
    )


def save_plan(plan: Plan, path: Path) -> None:
    """Write a plan atomically; equal plans give equal files.

    Raises
    ------
    PlanError
        The file cannot be written.
    """
    try:
        write_text_atomically(path, canonical_json(plan) + "\n")
    except OSError as error:
        raise PlanError(f"plan {path} cannot be written: {error.strerror or error}") from error


def load_plan(path: Path) -> Plan:
    """Read a plan; nothing that it names is imported.

    Running or explaining a plan loads the model that it names, and a ``module.path:function`` executes code. So run
    or explain only plans from sources that you trust.

    Raises
    ------
    PlanError
        The file cannot be read, is no JSON, is of another version, does not fit the schema, or was edited.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise PlanError(f"plan {path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"plan {path} is not JSON: byte {error.start} is no UTF-8") from error
    try:
        document = json.loads(text, object_pairs_hook=_without_repetition, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise PlanError(f"plan {path} is not JSON: {error}") from error
    if not isinstance(document, dict) or "version" not in document:
        raise PlanError(f"plan {path} has no version: it is no plan of meshwright")
    if document["version"] is True or document["version"] != PLAN_VERSION:
        found = json.dumps(document["version"])
        raise PlanError(f"plan {path} has version {found:.40}, this meshwright reads {PLAN_VERSION}: plan again")
    try:
        plan = Plan.model_validate_json(text)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
        raise PlanError(f"plan {path}: {_field_path(first['loc'])}: {first['msg']}{more}") from error
    digest = decision_digest(plan.decision)
    if digest != plan.digest:
        made_of = part_digests(plan.decision)
        edited = [name for name, made in plan.part_digests.items() if made_of.get(name) != made]
        where = f" in {', '.join(edited)}" if edited else ""
        raise PlanError(
            f"plan {path} was edited{where}: its decision has digest {digest}, the file names {plan.digest}: plan again"
        )
    return plan


def schedule_of(plan: Plan, graph: OperatorGraph) -> Schedule:
    """Schedule of a plan in a traced graph, whose operators are found by identity.

    Raises
    ------
    PlanError
        The graph lacks an operator or a value of the plan.
    """
    return decode_schedule(plan.decision, graph)


def write_schema(path: Path = SCHEMA_PATH) -> None:
    """Write the published schema; a test holds the file equal to the types."""
    write_text_atomically(path, json.dumps(plan_schema(), indent=2, sort_keys=True) + "\n")


def _without_repetition(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} occurs twice in one object")
    return result


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no number of JSON")


def _field_path(location: tuple[int | str, ...]) -> str:
    return (
        "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".") or "plan"
    )
