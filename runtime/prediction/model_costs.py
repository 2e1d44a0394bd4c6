"""Costs of a model's own instructions, from plans of it that ran on this machine.

A plan is made, run with its instructions timed, and made again with what was measured, until it has no instruction that
was not measured. Random plans beside it measure instructions that no plan uses yet, as many different ones as they can.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean

from planner.machine.calibration import CalibrationError, save_cluster
from planner.machine.cluster import (
    LOCAL_NAMES,
    ClusterSpec,
    load_cluster,
    local_cluster_path,
    read_cluster,
)
from planner.machine.known_costs import CostSource, MeasuredCost, MeasuredCosts
from planner.models.references import ModelReference
from planner.plan.document import Plan, schedule_of
from planner.schedule.instructions import Reshard, Schedule, Update
from planner.session import PlanningSession, PlanRequest, session_of
from runtime.job.launch import run_plan
from runtime.measure.profile import profile_of
from runtime.measure.run_report import RunReport
from runtime.prediction.random_plans import covering_plans

ROUNDS = 3
"""Plans that are run at most, unless the caller says otherwise."""

STEPS = 4
"""Steps of a run; the first is metered, and the median of the others counts."""

_LEAST_SECONDS = 1e-9


def calibrate_model(
    reference: ModelReference,
    mesh: tuple[int, ...],
    request: PlanRequest,
    optimizer: str | None = None,
    path: Path | None = None,
    rounds: int = ROUNDS,
    sample: int = 0,
    progress: Callable[[str], None] = lambda _: None,
    device: str = "cpu",
) -> tuple[Plan, RunReport, ClusterSpec]:
    """Measure the instructions that plans of a model use on this machine, and keep them with the cluster.

    Parameters
    ----------
    reference, mesh, request, optimizer
        What is planned.
    path
        Cluster file to write, and to begin from where it exists; by default that of ``local-cpu`` or ``local-cuda``.
    rounds
        Plans that are run at most.
    sample
        Random plans to run first, at most (:func:`runtime.prediction.random_plans.covering_plans`).
    progress
        Called with a line before each run.
    device
        Kind of device, ``cpu`` or ``cuda``.

    Returns
    -------
    Plan, RunReport, ClusterSpec
        The last plan that ran, the report of its run, and the cluster as written.

    Raises
    ------
    CalibrationError
        The cluster was not measured on this machine.
    """
    cluster = load_cluster(LOCAL_NAMES[device]) if path is None or not path.exists() else read_cluster(path)
    if cluster.measured is None:
        raise CalibrationError(f"{path} is no measured machine: run `meshwright calibrate` first")
    kept = path or local_cluster_path(device)
    session = PlanningSession(reference, cluster, mesh, optimizer)
    for number, plan in enumerate(covering_plans(session, sample, request.seed), start=1):
        progress(f"random plan {number} of {sample}")
        cluster, _ = _measured(session, plan, cluster, kept)
    made: tuple[Plan, RunReport] | None = None
    for number in range(1, rounds + 1):
        session = PlanningSession(reference, cluster, mesh, optimizer)
        plan = session.plan(request)
        unknown = unmeasured_seconds(session, schedule_of(plan, session.graph))
        if made is not None and not unknown:
            break
        progress(f"plan {number} of at most {rounds}: {unknown:.3g} s of the step were not measured")
        cluster, report = _measured(session, plan, cluster, kept)
        made = plan, report
    assert made is not None
    return (*made, cluster)


def _measured(session: PlanningSession, plan: Plan, cluster: ClusterSpec, path: Path) -> tuple[ClusterSpec, RunReport]:
    """Run a plan of a session, and keep what its instructions took with the cluster."""
    report = run_plan(plan, steps=STEPS, profile=True)
    costs = measured_costs(session, schedule_of(plan, session.graph), report)
    found = with_costs(cluster, costs)
    save_cluster(found, path)
    return found, report


def add_costs_of_run(plan: Plan, report: RunReport, path: Path, allow_code: bool = False) -> ClusterSpec:
    """Keep what the instructions of a plan took in a run elsewhere, such as a job of several machines.

    Parameters
    ----------
    plan, report
        The plan, and the report of a run that timed its instructions.
    path
        File of the cluster that ran it, which gets the costs.
    allow_code
        As for :func:`planner.models.references.check_code`.

    Raises
    ------
    CalibrationError
        The report is not of this plan, or has no times of instructions.
    ClusterError
        The file is no cluster.
    """
    if report.plan_digest != plan.digest:
        raise CalibrationError(f"the report is of plan {report.plan_digest[:12]}, the plan is {plan.digest[:12]}")
    if report.instruction_ns is None or report.measured_step_s is None:
        raise CalibrationError("the report has no times of instructions: run the plan with --profile, 2 steps or more")
    cluster = read_cluster(path)
    session = session_of(plan, cluster, allow_code)
    found = with_costs(cluster, measured_costs(session, schedule_of(plan, session.graph), report))
    save_cluster(found, path)
    return found


def unmeasured_seconds(session: PlanningSession, schedule: Schedule) -> float:
    """Seconds of a step whose costs were not measured."""
    seconds = session.instruction_costs.seconds_by_source(schedule)
    return sum(spent for source, spent in seconds.items() if source is not CostSource.MEASURED)


def measured_costs(session: PlanningSession, schedule: Schedule, report: RunReport) -> MeasuredCosts:
    """Costs of the instructions of a schedule, from a run that timed them."""
    assert report.instruction_ns is not None
    assert report.measured_step_s is not None
    times = profile_of(session.graph, schedule, report.instruction_ns, None).own.tolist()
    return costs_of_times(session, schedule, times, report.measured_step_s, updates_together=report.device == "cuda")


def costs_of_times(
    session: PlanningSession,
    schedule: Schedule,
    times: Sequence[float],
    step_seconds: float,
    *,
    updates_together: bool,
) -> MeasuredCosts:
    """Costs of the instructions of a schedule that took so many nanoseconds.

    A cost holds the views and releases before its instruction. What a rank waits for others, and what it does
    between steps, is spread over all of them in proportion, so that they add up to the step.

    Parameters
    ----------
    session, schedule
        What ran; costs are corrected beside those of the session's cluster.
    times
        Nanoseconds of each instruction.
    step_seconds
        What a step took.
    updates_together
        Whether one kernel made several updates, so that only the sum of their times is known.
    """
    if updates_together:
        times = _shared_by_updates(session, schedule, times)
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    modelled: dict[tuple[str, str], float] = {}
    before, total = 0.0, 0.0
    for entry, own in zip(schedule.instructions, times, strict=True):
        if isinstance(entry, Reshard) and entry.overlapped:
            continue  # it only starts here
        parts = session.instruction_costs.parts(schedule, entry)
        if not parts:
            before += own
            continue
        seconds, before = (own + before) * 1e-9, 0.0
        total += seconds
        whole = sum(part.modelled for part in parts)
        for part in parts:
            found[part.kind, part.signature].append(seconds * part.modelled / whole)
            modelled[part.kind, part.signature] = part.modelled
    spread = step_seconds / total
    costs: MeasuredCosts = defaultdict(dict)
    for (kind, signature), seconds_of in found.items():
        mean = max(spread * fmean(seconds_of), _LEAST_SECONDS)
        costs[kind][signature] = MeasuredCost(seconds=mean, modelled=modelled[kind, signature])
    return dict(costs)


def _shared_by_updates(session: PlanningSession, schedule: Schedule, times: Sequence[float]) -> list[float]:
    """The times with those of all updates shared among them as the model predicts them."""
    modelled = [
        sum(part.modelled for part in session.instruction_costs.parts(schedule, entry))
        if isinstance(entry, Update)
        else 0.0
        for entry in schedule.instructions
    ]
    whole = sum(modelled)
    spent = sum(own for own, share in zip(times, modelled, strict=True) if share)
    return [spent * share / whole if share else own for own, share in zip(times, modelled, strict=True)]


def with_costs(cluster: ClusterSpec, costs: MeasuredCosts) -> ClusterSpec:
    """The cluster with more measured costs; those of an instruction that was measured before are averaged."""
    merged: MeasuredCosts = {kind: dict(entries) for kind, entries in cluster.costs.items()}
    for kind, entries in costs.items():
        known = merged.setdefault(kind, {})
        for signature, cost in entries.items():
            known[signature] = known[signature].merged(cost) if signature in known else cost
    ordered = {kind: dict(sorted(merged[kind].items())) for kind in sorted(merged)}
    return cluster.model_copy(update={"costs": ordered})
