"""The tables of ``run --profile``: each kind of instruction and each module, predicted beside measured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.table import Table

from planner.common.units import format_seconds
from runtime.measure.profile import Line

if TYPE_CHECKING:
    from planner.plan.document import Plan
    from runtime.measure.profile import StepProfile
    from runtime.measure.run_report import RunReport


def profile_of_run(plan: Plan, report: RunReport, cluster: str | None = None, allow_code: bool = False) -> StepProfile:
    """Profile of a run that timed its instructions, priced with the cluster of the plan.

    Parameters
    ----------
    plan, report
        The plan and the report of its run.
    cluster, allow_code
        As for :func:`planner.session.session_of`.

    Raises
    ------
    ValueError
        The cluster is not known here, or the plan is not of the step as traced here.
    """
    from planner.plan.document import schedule_of
    from planner.replay.clocks import step_time
    from planner.replay.memory import LocalBytes
    from planner.session import session_of
    from runtime.measure.profile import profile_of

    assert report.instruction_ns is not None, "the run timed its instructions"
    session = session_of(plan, cluster, allow_code)
    schedule = schedule_of(plan, session.graph)
    time, _ = step_time(session.graph, schedule, session.instruction_costs, LocalBytes(session.graph, session.mesh))
    return profile_of(session.graph, schedule, report.instruction_ns, time)


def profile_tables(profile: StepProfile) -> tuple[Table, Table]:
    """Tables by kind of instruction and by module."""
    return _table("by kind", profile.by_kind()), _table("by module", profile.by_module())


def _table(title: str, lines: Sequence[Line]) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in ("", "count", "predicted", "measured", "ratio", "difference"):
        table.add_column(heading, justify="left" if not heading else "right")
    whole = Line("step", 0, sum(line.predicted_ns for line in lines), sum(line.measured_ns for line in lines))
    for line in (*lines, whole):
        if line is whole:
            table.add_section()
        table.add_row(
            line.name,
            str(line.count or ""),
            format_seconds(line.predicted_ns * 1e-9),
            format_seconds(line.measured_ns * 1e-9),
            f"{line.measured_ns / line.predicted_ns:.2f}" if line.predicted_ns else "-",
            format_seconds((line.measured_ns - line.predicted_ns) * 1e-9),
        )
    return table
