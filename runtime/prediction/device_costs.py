"""Costs of instructions that a device took, from the report of its check, for plans that are made elsewhere.

``python -m runtime.prediction.device_costs REPORT --cluster h200-8-nvlink --out h200.json`` writes a cluster with them,
for which ``python -m planner.benchmarks.device_plans FOLDER --cluster h200.json`` makes the plans of the check again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from planner.benchmarks.device_plans import CASES
from planner.machine.calibration import save_cluster
from planner.machine.cluster import ClusterSpec, load_cluster
from planner.plan.document import schedule_of
from planner.session import PlanningSession
from runtime.gpu_check.plans import required
from runtime.prediction.model_costs import costs_of_times, with_costs

CHECK = "time by class, "


def device_cluster(report: Path, cluster: str) -> ClusterSpec:
    """A cluster with the costs of all plans whose instructions a report has times of."""
    spec = found = load_cluster(cluster)
    for outcome in json.loads(report.read_text(encoding="utf-8"))["outcomes"]:
        name = outcome["name"].removeprefix(CHECK)
        if name == outcome["name"] or "instruction_ns" not in outcome["figures"]:
            continue
        session = PlanningSession(CASES[name].reference, spec, CASES[name].mesh)
        figures, schedule = outcome["figures"], schedule_of(required(name), session.graph)
        costs = costs_of_times(
            session, schedule, figures["instruction_ns"], figures["measured_seconds"], updates_together=True
        )
        found = with_costs(found, costs)
    return found


def main() -> None:
    """Write a cluster as the command line says."""
    parser = argparse.ArgumentParser(description="Costs of a device from the report of its check.")
    parser.add_argument("report", type=Path)
    parser.add_argument("--cluster", required=True, help="preset that the costs correct")
    parser.add_argument("--out", type=Path, required=True, help="cluster file to write")
    found = parser.parse_args()
    save_cluster(device_cluster(found.report, found.cluster), found.out)


if __name__ == "__main__":
    main()
