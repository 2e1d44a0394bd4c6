"""Costs of instructions that a device took, from the report of its check, for plans that are made elsewhere.

``python -m runtime.prediction.device_costs REPORT --cluster h200-8-nvlink --out h200.json`` writes a cluster with them,
for which ``python -m planner.benchmarks.device_plans FOLDER --cluster h200.json`` makes the plans of the check again.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from planner.benchmarks.device_plans import CASES
from planner.machine.calibration import save_cluster
from planner.machine.cluster import ClusterSpec, load_cluster
from planner.machine.known_costs import MeasuredCost, MeasuredCosts
from planner.plan.document import Plan, schedule_of
from planner.session import PlanningSession
from runtime.gpu_check.plans import required
from runtime.prediction.model_costs import with_costs

CHECK = "time by class, "


def device_costs(
    session: PlanningSession,
    plan: Plan,
    instruction_ns: Sequence[int],
    step_seconds: float,
    without: Sequence[str] = (),
) -> MeasuredCosts:
    """Costs of the instructions of a plan, from the times of their kernels.

    What the step takes beside its kernels is spread over them in proportion, so that they add up to it.

    Parameters
    ----------
    session
        Of the step, with the cluster that is corrected.
    plan, instruction_ns
        The plan that ran, and nanoseconds of its instructions.
    step_seconds
        What a step took.
    without
        Parts of names of operators whose costs are not taken, as their kernels have changed since.
    """
    schedule = schedule_of(plan, session.graph)
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    modelled: dict[tuple[str, str], float] = {}
    for entry, nanoseconds in zip(schedule.instructions, instruction_ns, strict=True):
        parts = session.instruction_costs.parts(schedule, entry)
        whole = sum(part.modelled for part in parts)
        if not nanoseconds or not parts:
            continue
        for part in parts:
            if any(name in part.kind for name in without):
                continue
            found[part.kind, part.signature].append(nanoseconds * 1e-9 * part.modelled / whole)
            modelled[part.kind, part.signature] = part.modelled
    spread = step_seconds * 1e9 / sum(instruction_ns)
    costs: MeasuredCosts = defaultdict(dict)
    for (kind, signature), seconds in found.items():
        costs[kind][signature] = MeasuredCost(
            seconds=spread * fmean(seconds), modelled=modelled[kind, signature], runs=len(seconds)
        )
    return dict(costs)


def device_cluster(report: Path, cluster: str, without: Sequence[str] = ()) -> ClusterSpec:
    """A cluster with the costs of all plans whose instructions a report has times of."""
    spec = load_cluster(cluster)
    measured: list[MeasuredCosts] = []
    for outcome in json.loads(report.read_text(encoding="utf-8"))["outcomes"]:
        name = outcome["name"].removeprefix(CHECK)
        if name == outcome["name"] or "instruction_ns" not in outcome["figures"]:
            continue
        session = PlanningSession(CASES[name].reference, spec, CASES[name].mesh)
        figures = outcome["figures"]
        times, seconds = figures["instruction_ns"], figures["measured_seconds"]
        measured.append(device_costs(session, required(name), times, seconds, without))
    found = spec
    for costs in measured:
        found = with_costs(found, costs)
    return found


def main() -> None:
    """Write a cluster as the command line says."""
    parser = argparse.ArgumentParser(description="Costs of a device from the report of its check.")
    parser.add_argument("report", type=Path)
    parser.add_argument("--cluster", required=True, help="preset that the costs correct")
    parser.add_argument("--out", type=Path, required=True, help="cluster file to write")
    parser.add_argument("--without", nargs="*", default=[], help="parts of names of operators to leave out")
    found = parser.parse_args()
    save_cluster(device_cluster(found.report, found.cluster, found.without), found.out)


if __name__ == "__main__":
    main()
