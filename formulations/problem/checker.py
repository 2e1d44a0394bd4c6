"""Checker of assignments: replays one in exact integers and lists all violations.

It shares no code with the solvers, and its totals are Python integers, because sums of int64 costs and amounts may
exceed int64.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from formulations.problem.solution import SolveResult, Status, relative_gap
from formulations.problem.strategy_problem import ProblemError, StrategyProblem, UsageTerm

_INT64_SAFE_TOTAL = 2**62


class ViolationKind(StrEnum):
    """Kinds of violations of a solution."""

    WRONG_LENGTH = "wrong_length"
    CHOICE_NOT_INTEGER = "choice_not_integer"
    CHOICE_OUT_OF_RANGE = "choice_out_of_range"
    FORBIDDEN_NODE = "forbidden_node"
    FORBIDDEN_FACTOR = "forbidden_factor"
    OVER_LIMIT = "over_limit"
    OBJECTIVE_MISMATCH = "objective_mismatch"
    PEAK_MISMATCH = "peak_mismatch"
    GAP_MISMATCH = "gap_mismatch"
    BOUND_ABOVE_OBJECTIVE = "bound_above_objective"
    STATUS_MISMATCH = "status_mismatch"


@dataclass(frozen=True, slots=True)
class Violation:
    """One violation; fields that do not belong to its kind are None.

    Parameters
    ----------
    kind, message
        Kind for programs, message for readers.
    node, factor
        Index of the node or factor concerned.
    resource, time, usage, limit
        Of ``OVER_LIMIT``: the resource, the worst time of one unbroken stretch over the limit, and the usage and
        the limit there.
    """

    kind: ViolationKind
    message: str
    node: int | None = None
    factor: int | None = None
    resource: int | None = None
    time: int | None = None
    usage: int | None = None
    limit: int | None = None


@dataclass(frozen=True, slots=True)
class Peak:
    """Largest usage of one resource over time and the first time at which it occurs."""

    resource: int
    usage: int
    time: int


@dataclass(frozen=True, slots=True)
class CheckReport:
    """Result of a check: the recomputed objective, peaks per resource, and violations.

    ``objective`` is None and ``peaks`` is empty where the choices do not index the problem.
    """

    objective: int | None
    peaks: tuple[Peak, ...]
    violations: tuple[Violation, ...]

    @property
    def ok(self) -> bool:
        """Whether there is no violation."""
        return not self.violations

    def kinds(self) -> frozenset[ViolationKind]:
        """Return the kinds of violation that occur."""
        return frozenset(violation.kind for violation in self.violations)


def check(
    problem: StrategyProblem,
    choices: Sequence[int],
    claimed_objective: int | None = None,
    claimed_bound: int | None = None,
) -> CheckReport:
    """Replay ``choices`` and compare with the claims about them.

    Parameters
    ----------
    problem
        A validated problem.
    choices
        One strategy index per node.
    claimed_objective, claimed_bound
        Compared with the recomputed objective where given. A bound is compared only with a
        feasible assignment: an infeasible one may well cost less than any bound.

    Returns
    -------
    CheckReport
        ``ok`` where the assignment is feasible and every claim holds.
    """
    defects = _index_defects(problem, choices)
    if defects:
        return CheckReport(None, (), tuple(defects))
    objective = sum(int(node.cost[choice]) for node, choice in zip(problem.nodes, choices, strict=True))
    violations = []
    for i, (node, choice) in enumerate(zip(problem.nodes, choices, strict=True)):
        if node.forbidden is not None and node.forbidden[choice]:
            message = f"node {i} ({node.name}): strategy {choice} is forbidden"
            violations.append(Violation(ViolationKind.FORBIDDEN_NODE, message, node=i))
    for j, factor in enumerate(problem.factors):
        entry = tuple(choices[i] for i in factor.scope)
        objective += int(factor.cost[entry])
        if factor.forbidden is not None and factor.forbidden[entry]:
            message = f"factor {j} over nodes {factor.scope}: combination {entry} is forbidden"
            violations.append(Violation(ViolationKind.FORBIDDEN_FACTOR, message, factor=j))
    profiles = usage_profile(problem, choices)
    peaks = tuple(_peak(r, profile) for r, profile in enumerate(profiles))
    for r, profile in enumerate(profiles):
        violations += _over_limit(problem, r, profile)
    feasible = not violations
    if claimed_objective is not None and claimed_objective != objective:
        message = f"objective {claimed_objective} is claimed, the choices cost {objective}"
        violations.append(Violation(ViolationKind.OBJECTIVE_MISMATCH, message))
    if claimed_bound is not None and feasible and claimed_bound > objective:
        message = f"bound {claimed_bound} is claimed, but a feasible assignment costs {objective}"
        violations.append(Violation(ViolationKind.BOUND_ABOVE_OBJECTIVE, message))
    return CheckReport(objective, peaks, tuple(violations))


def check_result(problem: StrategyProblem, result: SolveResult) -> CheckReport:
    """Check every field of a result that the problem alone determines.

    Beside what :func:`check` finds: a missing or wrong objective, peak usage and gap, and a status
    that the fields contradict (``optimal`` without choices or with a bound that is far away is the
    caller's tolerance and is not judged here; choices without a status that has any are).
    """
    has_choices = result.choices is not None
    if has_choices != (result.status in (Status.OPTIMAL, Status.FEASIBLE)):
        message = f"status {result.status} {'with' if has_choices else 'without'} choices"
        return CheckReport(None, (), (Violation(ViolationKind.STATUS_MISMATCH, message),))
    if result.choices is None:
        return CheckReport(None, (), tuple(_empty_result_defects(result)))
    report = check(problem, result.choices, result.objective, result.bound)
    if report.objective is None:
        return report
    violations = list(report.violations)
    if result.objective is None:
        message = f"no objective is given, the choices cost {report.objective}"
        violations.append(Violation(ViolationKind.OBJECTIVE_MISMATCH, message))
    peaks = tuple(peak.usage for peak in report.peaks)
    if tuple(result.peak_usage) != peaks:
        message = f"peak usage {tuple(result.peak_usage)} is claimed, the replay peaks at {peaks}"
        violations.append(Violation(ViolationKind.PEAK_MISMATCH, message))
    gap = relative_gap(result.objective, result.bound)
    if result.gap != gap:
        violations.append(Violation(ViolationKind.GAP_MISMATCH, f"gap {result.gap} is claimed, it is {gap}"))
    if result.status is Status.OPTIMAL and result.bound is None:
        violations.append(Violation(ViolationKind.STATUS_MISMATCH, "status optimal without a bound"))
    return CheckReport(report.objective, report.peaks, tuple(violations))


def usage_profile(problem: StrategyProblem, choices: Sequence[int]) -> list[NDArray[np.int64] | NDArray[np.object_]]:
    """Return the exact usage of every resource at every time.

    Returns
    -------
    list of numpy.ndarray
        Per resource, shape ``(horizon,)``: int64 where the amounts cannot leave it, else an
        object array of Python integers.
    """
    events: list[tuple[list[int], list[int], list[int]]] = [([], [], []) for _ in problem.resources]
    for scope, term in problem.usage_terms():
        if term.start < term.end:
            amount = int(term.amount[tuple(choices[i] for i in scope)])
            if amount:
                starts, ends, amounts = events[term.resource]
                starts.append(term.start)
                ends.append(term.end)
                amounts.append(amount)
    profiles: list[NDArray[np.int64] | NDArray[np.object_]] = []
    for starts, ends, amounts in events:
        dtype = np.int64 if sum(amounts) < _INT64_SAFE_TOTAL else np.object_
        change = np.zeros(problem.horizon + 1, dtype=dtype)
        values = np.array(amounts, dtype=dtype)
        np.add.at(change, starts, values)
        np.subtract.at(change, ends, values)
        profiles.append(np.cumsum(change)[: problem.horizon])
    return profiles


def tensors_alive(
    problem: StrategyProblem, choices: Sequence[int], resource: int, time: int
) -> list[tuple[tuple[int, ...], int]]:
    """Return the users of ``resource`` at ``time``: pairs of scope and amount, the largest first.

    Several terms of one scope are added up; equal amounts keep the order of the problem.

    Raises
    ------
    ProblemError
        If the resource or the time does not exist.
    """
    if not 0 <= resource < len(problem.resources):
        raise ProblemError(f"resource {resource} does not exist; there are {len(problem.resources)}")
    if not 0 <= time < problem.horizon:
        raise ProblemError(f"time {time} is not within [0, {problem.horizon})")
    amounts: dict[tuple[int, ...], int] = {}
    for scope, term in problem.usage_terms():
        if _alive(term, resource, time):
            amount = int(term.amount[tuple(choices[i] for i in scope)])
            if amount:
                amounts[scope] = amounts.get(scope, 0) + amount
    return sorted(amounts.items(), key=lambda item: -item[1])


def _alive(term: UsageTerm, resource: int, time: int) -> bool:
    return term.resource == resource and term.start <= time < term.end


def _index_defects(problem: StrategyProblem, choices: Sequence[int]) -> list[Violation]:
    if len(choices) != len(problem.nodes):
        message = f"{len(choices)} choices for {len(problem.nodes)} nodes"
        return [Violation(ViolationKind.WRONG_LENGTH, message)]
    defects = []
    for i, (node, choice) in enumerate(zip(problem.nodes, choices, strict=True)):
        try:
            index = operator.index(choice)
        except TypeError:
            message = f"node {i} ({node.name}): choice {choice!r} is not an integer"
            defects.append(Violation(ViolationKind.CHOICE_NOT_INTEGER, message, node=i))
            continue
        if not 0 <= index < node.size:
            message = f"node {i} ({node.name}): choice {choice} is not one of its {node.size} strategies"
            defects.append(Violation(ViolationKind.CHOICE_OUT_OF_RANGE, message, node=i))
    return defects


def _peak(resource: int, profile: NDArray[np.int64] | NDArray[np.object_]) -> Peak:
    if not len(profile):
        return Peak(resource, 0, 0)
    time = int(np.argmax(profile))
    return Peak(resource, int(profile[time]), time)


def _over_limit(
    problem: StrategyProblem, resource: int, profile: NDArray[np.int64] | NDArray[np.object_]
) -> list[Violation]:
    """One violation per unbroken stretch of times over the limit, at its worst time."""
    limit = problem.resources[resource].limit
    if limit is None or not len(profile):
        return []
    over = np.concatenate([[False], np.asarray(profile > limit, dtype=np.bool_), [False]])
    edges = np.flatnonzero(over[1:] != over[:-1])
    violations = []
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        time = int(start + np.argmax(profile[start:end]))
        usage = int(profile[time])
        name = f" ({problem.time_names[time]})" if time < len(problem.time_names) else ""
        message = f"resource {problem.resources[resource].name}: {usage} used at time {time}{name}, limit {limit}"
        violations.append(
            Violation(ViolationKind.OVER_LIMIT, message, resource=resource, time=time, usage=usage, limit=limit)
        )
    return violations


def _empty_result_defects(result: SolveResult) -> list[Violation]:
    """Fields that a result without choices must leave empty, but are set."""
    defects = []
    if result.objective is not None:
        message = f"objective {result.objective} without choices"
        defects.append(Violation(ViolationKind.OBJECTIVE_MISMATCH, message))
    if result.peak_usage:
        message = f"peak usage {result.peak_usage} without choices"
        defects.append(Violation(ViolationKind.PEAK_MISMATCH, message))
    if result.gap is not None:
        defects.append(Violation(ViolationKind.GAP_MISMATCH, f"gap {result.gap} without choices"))
    if result.status is Status.BOUND_ONLY and result.bound is None:
        defects.append(Violation(ViolationKind.STATUS_MISMATCH, "status bound_only without a bound"))
    return defects
