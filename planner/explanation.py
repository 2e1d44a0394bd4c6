"""Explanation of a plan: resharding, recomputation, contents of the peak, and the price of memory."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from formulations.problem.files import write_text_atomically
from formulations.problem.solution import Progress
from formulations.solvers import DEFAULT_SOLVER, SOLVERS
from planner.common.infeasibility import InfeasibleError
from planner.common.root_name import shown
from planner.common.units import format_bytes, format_seconds
from planner.graph.operator_graph import OperatorGraph
from planner.graph.placement import local_numel
from planner.machine.cluster import ClusterError
from planner.plan.document import Plan, schedule_of, verify_plan
from planner.plan.notes import undivided_operators
from planner.replay.checker import ReplayReport
from planner.replay.clocks import bucketed_quanta
from planner.schedule.instructions import Compute, Offload, Reshard, Schedule
from planner.session import PlanningSession, PlanRequest

if TYPE_CHECKING:
    import pandas as pd

GIB = 2**30
TOP = 10
"""Lines per section."""


@dataclass(frozen=True, slots=True)
class Section:
    """A heading and its lines."""

    title: str
    lines: tuple[str, ...]


@dataclass(frozen=True)
class Explanation:
    """Sections of text, shown as lists in notebooks."""

    sections: tuple[Section, ...]

    def __repr__(self) -> str:
        return f"<explanation: {', '.join(section.title for section in self.sections)}>"

    def __str__(self) -> str:
        return "\n\n".join(
            "\n".join([section.title, *(f"  {line}" for line in section.lines)]) for section in self.sections
        )

    def to_pandas(self) -> pd.DataFrame:
        """A row per line, with its section; needs pandas, which the extra ``notebooks`` installs."""
        import pandas as pd

        rows = [(section.title, line) for section in self.sections for line in section.lines]
        return pd.DataFrame(rows, columns=["section", "line"])

    def save(self, path: str | Path) -> None:
        """Write the sections as JSON, atomically.

        Raises
        ------
        OSError
            The file cannot be written.
        """
        write_text_atomically(path, json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n")

    def _repr_html_(self) -> str:
        return "".join(
            f"<h4>{escape(section.title)}</h4><ul>{''.join(f'<li>{escape(line)}</li>' for line in section.lines)}</ul>"
            for section in self.sections
        )


def explain_plan(
    session: PlanningSession,
    plan: Plan,
    time_limit: float,
    progress: Callable[[Progress], None] | None = None,
) -> Explanation:
    """Explain a plan in the session that it was made in.

    Parameters
    ----------
    session
        The step, mesh and cluster of the plan.
    plan
        The plan; it is verified first.
    time_limit
        Seconds for each of the two solves that price memory.
    progress
        Called with every better incumbent or bound of these solves.

    Raises
    ------
    PlanError
        The plan was made for something else or does not hold.
    """
    graph = session.graph
    report = verify_plan(
        plan,
        graph,
        session.fingerprints,
        seconds=session.instruction_costs,
        allowed=session.allowed_strategies,
    )
    schedule = schedule_of(plan, graph)
    return Explanation(
        (
            _reshardings(session, schedule),
            _recomputed(session, schedule, report),
            offload_section(graph, schedule, report),
            _alive(report),
            *_undivided(session, schedule),
            _memory_price(session, plan, time_limit, progress),
        )
    )


def _reshardings(session: PlanningSession, schedule: Schedule) -> Section:
    """Most expensive reshardings, equal ones of different layers added up."""
    graph = session.graph
    cost: dict[tuple[str, str], int] = defaultdict(int)
    count: dict[tuple[str, str], int] = defaultdict(int)
    shares, _ = bucketed_quanta(schedule, session.instruction_costs)
    for at, instruction in enumerate(schedule.instructions):
        if isinstance(instruction, Reshard):
            value = graph.values[schedule.buffers[instruction.source].value]
            way = " -> ".join(",".join(placement) for placement in instruction.path)
            key = value.name, way
            alone = session.instruction_costs.reshard_quanta(value.index, instruction.path, instruction.in_place)
            cost[key] += shares.get(at, alone)
            count[key] += 1
    total = sum(cost.values())
    lines = [f"{format_seconds(total * 1e-9)} a step in {sum(count.values())} reshardings"]
    for key in sorted(cost, key=lambda entry: (-cost[entry], entry))[:TOP]:
        name, way = key
        lines.append(f"{format_seconds(cost[key] * 1e-9)}  {count[key]} x  {name}: {way}")
    return Section("Costliest reshardings", tuple(lines))


def _recomputed(session: PlanningSession, schedule: Schedule, report: ReplayReport) -> Section:
    """Recomputed operators, their time, and the bytes that recomputation saves at the peak."""
    graph = session.graph
    first: dict[int, int] = {}
    rows = []
    saved_at_peak = 0
    for position, instruction in enumerate(schedule.instructions):
        if not isinstance(instruction, Compute):
            continue
        if not instruction.recompute:
            first.setdefault(instruction.operator, position)
            continue
        buffers = [schedule.buffers[buffer] for buffer in instruction.outputs if buffer is not None]
        nbytes = sum(
            local_numel(graph.values[buffer.value].spec.shape, buffer.placement, schedule.mesh)
            * graph.values[buffer.value].spec.item_bytes
            for buffer in buffers
        )
        outputs = tuple(None if b is None else schedule.buffers[b].placement for b in instruction.outputs)
        inputs = tuple(schedule.buffers[b].placement for b in instruction.inputs)
        quanta = session.instruction_costs.compute_quanta(instruction.operator, outputs, inputs)
        spans_peak = first[instruction.operator] < report.peak_instruction < position
        saved_at_peak += nbytes if spans_peak else 0
        rows.append((nbytes, quanta, shown(graph.operators[instruction.operator].identity), spans_peak))
    if not rows:
        return Section("Recomputed", ("nothing: every value that backward needs is kept",))
    total = sum(quanta for _, quanta, _, _ in rows)
    lines = [
        f"{len(rows)} operators, {format_seconds(total * 1e-9)} a step; "
        f"{format_bytes(saved_at_peak)} less are held at the moment of the peak"
    ]
    for nbytes, quanta, identity, spans_peak in sorted(rows, reverse=True)[:TOP]:
        moment = "at the peak" if spans_peak else "elsewhere"
        lines.append(f"{format_bytes(nbytes)} saved {moment} for {format_seconds(quanta * 1e-9)}: {identity}")
    return Section("Recomputed", tuple(lines))


def offload_section(graph: OperatorGraph, schedule: Schedule, report: ReplayReport) -> Section:
    """Offloaded tensors and the stalls for their copies, from the replay of a schedule."""
    host, rows = report.host, []
    for instruction in schedule.instructions:
        if isinstance(instruction, Offload):
            buffer = schedule.buffers[instruction.source]
            value = graph.values[buffer.value]
            nbytes = local_numel(value.spec.shape, buffer.placement, schedule.mesh) * value.spec.item_bytes
            rows.append((nbytes, value.name))
    if not rows:
        return Section("Offloaded", ("nothing: every value that backward needs stays on the device",))
    copied = host.offloaded_bytes + host.prefetched_bytes
    stall, hidden = report.stall_quanta or 0, report.hidden_bytes or 0
    lines = [
        f"{len(rows)} tensors, {format_bytes(host.offloaded_bytes)} a step; at most {format_bytes(host.peak_bytes)} "
        f"of host memory at once",
        f"{format_bytes(hidden)} of {format_bytes(copied)} copied both ways are hidden; the computation waits "
        f"{format_seconds(stall * 1e-9)} a step for the rest",
        *(f"{format_bytes(nbytes)}  {name}" for nbytes, name in sorted(rows, reverse=True)[:TOP]),
    ]
    return Section("Offloaded", tuple(lines))


def _alive(report: ReplayReport) -> Section:
    lines = [
        f"{format_bytes(report.peak_bytes)} at instruction {report.peak_instruction}",
        *(
            f"{format_bytes(tensor.nbytes)}  {tensor.category}  {shown(tensor.name)} ({','.join(tensor.placement)})"
            for tensor in report.alive_at_peak[:TOP]
        ),
    ]
    rest = report.alive_at_peak[TOP:]
    if rest:
        lines.append(f"{format_bytes(sum(tensor.nbytes for tensor in rest))} in {len(rest)} more tensors")
    return Section("Alive at the peak", tuple(lines))


def _undivided(session: PlanningSession, schedule: Schedule) -> list[Section]:
    """Operators with a dimension that does not divide by a mesh axis, all kinds of them."""
    found = undivided_operators(session.graph, schedule, session.space.report, session.instruction_costs)
    lines = tuple(f"{format_seconds(entry.seconds)}  {entry.count} x {entry.target}" for entry in found)
    return [Section("Not sharded on an axis that does not divide a dimension", lines)] if lines else []


def _memory_price(
    session: PlanningSession, plan: Plan, time_limit: float, progress: Callable[[Progress], None] | None
) -> Section:
    """Solve again with one GiB less and one GiB more, or half of what tensors may hold where that is less."""
    options, certificate = plan.decision.options, plan.record.certificate
    if options.memory_bytes is None or options.limit_bytes is None:
        return Section("Price of memory", ("there is no limit",))
    # The record is not covered by the digest, so a file may only name solvers that come with the package.
    solver = certificate.solver if certificate.solver in SOLVERS else DEFAULT_SOLVER
    lines = []
    change_bytes = min(GIB, options.limit_bytes // 2)
    more = min(options.memory_bytes + change_bytes, session.cluster.device.memory_bytes)
    for word, memory in (("less", options.memory_bytes - change_bytes), ("more", more)):
        if memory == options.memory_bytes:
            lines.append(f"{format_bytes(change_bytes)} more: the device has no more")
            continue
        named = format_bytes(abs(memory - options.memory_bytes))
        if plan.peak_bytes + options.reserve_bytes <= memory < options.memory_bytes:
            lines.append(f"{named} less: nothing, because this plan fits into that too")
            continue
        request = PlanRequest(
            memory,
            options.formulation,
            solver,
            time_limit,
            host_memory=options.host_memory_bytes,
            memory_model=options.memory_model,
        )
        try:
            found = session.solve(request, progress).result
        except (InfeasibleError, ClusterError) as error:
            lines.append(f"{named} {word}: {error}")
            continue
        objective = found.objective
        assert objective is not None, "a solve that returns has choices"
        planned = plan.decision.predicted.objective_ns
        if word == "more":
            objective = min(objective, planned)
        change = objective - planned
        bound = "" if found.bound is None else f", bound {format_seconds(found.bound * 1e-9)}"
        lines.append(
            f"{named} {word}: {'-' if change < 0 else '+'}{format_seconds(abs(change) * 1e-9)} a step "
            f"({format_seconds(objective * 1e-9)}{bound})"
        )
    return Section("Price of memory", tuple(lines))
