"""Checks of a plan: fingerprints, contradictions among solvers, and a replay equal to the prediction."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, permutations

import numpy as np

from formulations.problem.solution import Status
from planner.common.plan_error import PlanError
from planner.graph.operator_graph import OperatorGraph
from planner.graph.optimizers import optimizer_named
from planner.plan.decision import Decision, Fingerprints, MemoryOverTime, Predicted, PredictedHost
from planner.plan.format import Certificate, Plan
from planner.plan.kept_pins import broken_pins
from planner.plan.schedule_document import decode_schedule
from planner.replay.checker import OptimizerMemory, ReplayReport, StepCosts, StrategyTable, replay
from planner.replay.report import Category

PROFILE_POINTS = 200
"""Moments at which a plan keeps the memory over time."""

_HOST_BYTES = ("peak_bytes", "offloaded_bytes", "prefetched_bytes")
"""Part of a host prediction that a replay without costs gives."""


@dataclass(frozen=True, slots=True)
class _Claim:
    """Claim of a solver: it has a plan of this objective, and no plan is below this bound."""

    solver: str
    objective: int | None
    bound: int | None
    bound_word: str


def verify_plan(
    plan: Plan,
    graph: OperatorGraph,
    fingerprints: Fingerprints,
    *,
    seconds: StepCosts | None = None,
    allowed: StrategyTable | None = None,
    devices: int | None = None,
) -> ReplayReport:
    """Check a plan against the traced step and the cluster on which it is to run.

    Parameters
    ----------
    plan
        As :func:`planner.plan.document.load_plan` read it.
    graph
        The traced step.
    fingerprints
        Of this graph, cluster, calibration and these rules.
    seconds, allowed, devices
        As for :func:`planner.replay.checker.replay`; without ``seconds`` the objective is not checked, without
        ``allowed`` the strategies are not.

    Returns
    -------
    ReplayReport
        Without violations, and equal to the plan's prediction.

    Raises
    ------
    PlanError
        The plan is for another step, cluster or rules, contradicts itself, is no correct step, or differs from its
        prediction.
    """
    different = list(_differences(plan.decision.fingerprints, fingerprints))
    if different:
        raise PlanError(f"the plan was made for something else: {'; '.join(different)}: plan again")
    contradiction = certificate_contradiction(plan.record.certificate, plan.decision.predicted)
    if contradiction:
        raise PlanError(f"the plan contradicts itself: {contradiction}")
    if plan.decision.random_targets not in ((), graph.random_targets):  # absent in plans of earlier versions
        names = ", ".join(plan.decision.random_targets)
        raise PlanError(f"the plan says that its step draws random numbers in {names}, which it does not: plan again")
    options = plan.decision.options
    schedule = decode_schedule(plan.decision, graph)
    report = replay(
        graph,
        schedule,
        optimizer=OptimizerMemory(optimizer_named(options.optimizer, options.grad_accum, options.is_fused)),
        seconds=seconds,
        limit=options.limit_bytes,
        host_limit=options.host_memory_bytes,
        allowed=allowed,
        devices=devices,
        counter_based_random=options.counter_based_random,
        device=options.device or "cpu",
        releases_sources=bool(options.releases_sources),
    )
    if report.violations:
        more = f" (and {len(report.violations) - 1} more)" if len(report.violations) > 1 else ""
        raise PlanError(f"the plan is no correct step: {report.violations[0]}{more}")
    unkept = list(broken_pins(graph, schedule, options.pins))
    if unkept:
        raise PlanError(f"the plan does not keep its pins: {'; '.join(unkept)}")
    broken = list(_broken_promises(plan.decision, report))
    if broken:
        raise PlanError(f"the replay differs from the plan's prediction: {'; '.join(broken)}")
    return report


def certificate_contradiction(certificate: Certificate, predicted: Predicted) -> str | None:
    """Description of a contradiction between the claims of solvers, or None.

    A plan below a lower bound is one contradiction: a heuristic below an "optimum" as well as a bound above
    the plan. A solver that found no plan to exist is the other.
    """
    claims = [_claim(certificate.solver, certificate.status, predicted.objective_ns, predicted.bound_ns)]
    for check in certificate.cross_checks:
        if check.status is Status.INFEASIBLE:
            return f"{check.solver} claims that no plan exists, {certificate.solver} found one"
        claims.append(_claim(check.solver, check.status, check.objective_ns, check.bound_ns))
    for found, proved in (*((claim, claim) for claim in claims), *permutations(claims, 2)):
        if found.objective is not None and proved.bound is not None and found.objective < proved.bound:
            return (
                f"{found.solver} has a plan of {found.objective} ns, below the {proved.bound_word} of "
                f"{proved.bound} ns of {proved.solver}"
            )
    return None


def memory_over_time(report: ReplayReport, points: int = PROFILE_POINTS) -> MemoryOverTime:
    """At most ``points`` moments of a replay: the start, and the highest of each of equal spans, the peak included."""
    profile = report.profile
    total = profile.total_during
    edges = np.unique(np.linspace(0, len(total), min(points, len(total) + 1)).astype(np.int64))
    highest = [int(begin + total[begin:end].argmax()) for begin, end in pairwise(edges)]
    held = {
        category: (profile.at_start[category], *(int(profile.during(category)[at]) for at in highest))
        for category in Category
    }
    return MemoryOverTime(
        instructions=(-1, *highest), bytes={category: amounts for category, amounts in held.items() if any(amounts)}
    )


def host_prediction(report: ReplayReport) -> PredictedHost:
    """Host memory and copies of a replay; without costs the stalls are left out."""
    return PredictedHost(
        peak_bytes=report.host.peak_bytes,
        offloaded_bytes=report.host.offloaded_bytes,
        prefetched_bytes=report.host.prefetched_bytes,
        hidden_bytes=report.hidden_bytes or 0,
        stall_ns=report.stall_quanta or 0,
    )


def _claim(solver: str, status: Status, objective: int | None, bound: int | None) -> _Claim:
    if bound is None and status is Status.OPTIMAL:
        return _Claim(solver, objective, objective, "optimum")
    return _Claim(solver, objective, bound, "optimum" if status is Status.OPTIMAL and bound == objective else "bound")


_CHANGED = {
    "graph": "the module, its batch or torch's version has changed",
    "cluster": "the cluster is another one",
    "calibration": "the machine was calibrated anew",
    "rules": "the rules of operators have changed",
}


def _differences(planned: Fingerprints, here: Fingerprints) -> Iterator[str]:
    for name in Fingerprints.model_fields:
        was, now = getattr(planned, name), getattr(here, name)
        if was != now:
            yield f"{_CHANGED[name]} ({name} is {(now or 'none')[:12]}, the plan has {(was or 'none')[:12]})"


def _broken_promises(decision: Decision, report: ReplayReport) -> Iterator[str]:
    predicted = decision.predicted
    if report.total_quanta is not None and report.total_quanta != predicted.objective_ns:
        yield f"a step takes {report.total_quanta} ns, {predicted.objective_ns} ns predicted"
    if report.peak_bytes != predicted.peak_bytes:
        yield f"the peak is {report.peak_bytes} bytes, {predicted.peak_bytes} predicted"
    elif report.peak_instruction != predicted.peak_instruction:
        yield f"the peak is at instruction {report.peak_instruction}, {predicted.peak_instruction} predicted"
    elif memory_over_time(report) != predicted.memory:
        yield "the memory over time differs from the prediction"
    timed = PredictedHost.model_fields if report.total_quanta is not None else _HOST_BYTES
    for name in timed:
        found, expected = getattr(host_prediction(report), name), getattr(predicted.host, name)
        if found != expected:
            yield f"host: {name} is {found}, {expected} predicted"
