"""``make demo``: GPT-2 from configuration to a checked plan to a run on two local processes.

Writes ``.demo/plan.json`` and ``.demo/report.json`` and prints one table of predicted and measured figures.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from formulations.problem.files import write_text_atomically
from planner.machine.cluster import LOCAL_NAME, ClusterError, load_cluster
from planner.plan.document import Plan, load_plan, save_plan, verify_plan
from runtime.commands.tables.progress import progress_line
from runtime.measure.run_report import RunReport

if TYPE_CHECKING:
    from planner.models.references import ModelReference

RANKS = 2
BATCH, SEQUENCE = 4, 256
MEMORY_BYTES = 2_000 * 2**20
STEPS = 3
SOLVER, SOLVER_SECONDS = "portfolio", 20.0
CALIBRATION_SECONDS, CALIBRATION_GAP = 10.0, 0.005
DATA = Path("README.md")
FOLDER = Path(".demo")


def main() -> int:
    """Calibrate where needed, plan, run, compare; 0 when the run equals one process."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    from rich.console import Console

    from runtime.commands.tables.run import run_table
    from runtime.job.launch import run_plan

    _calibrate_once()
    plan, checker = _planned_and_checked(FOLDER / "plan.json")
    with progress_line(f"running {STEPS} steps on {RANKS} ranks and on one process"):
        report = run_plan(plan, steps=STEPS, check=True, data=DATA)
    summary = demo_report(plan, checker, report)
    write_text_atomically(FOLDER / "report.json", json.dumps(summary, indent=2) + "\n")
    Console().print(run_table(plan, report))
    failures = report.failures()
    for failure in failures:
        print("meshwright:", failure, file=sys.stderr)
    return 1 if failures else 0


def _reference() -> ModelReference:
    from planner.models.references import ModelReference

    return ModelReference("hf:gpt2", BATCH, SEQUENCE, "float32", seed=0, dropout=0.0)


def _calibrate_once() -> None:
    """Measure this machine, and the instructions of a first plan of the model on it, unless that was done."""
    try:
        cluster = load_cluster(LOCAL_NAME)
    except ClusterError:
        from runtime.calibration.calibrate import calibrate

        with progress_line(f"measuring this machine with {RANKS} processes"):
            cluster = calibrate(RANKS)
    if not cluster.costs:
        from planner.session import PlanRequest
        from runtime.prediction.model_costs import calibrate_model

        request = PlanRequest(MEMORY_BYTES, time_limit=CALIBRATION_SECONDS, gap=CALIBRATION_GAP)
        with progress_line("running a first plan, every instruction timed"):
            calibrate_model(_reference(), (RANKS,), request, rounds=1)


def _planned_and_checked(path: Path) -> tuple[Plan, str]:
    """Plan, write the file, read it back and replay it."""
    from planner.api import PlanningSession, PlanRequest

    reference = _reference()
    with progress_line(f"planning {reference.source}", 1e-9) as line:
        session = PlanningSession(reference, LOCAL_NAME, (RANKS,))
        save_plan(session.plan(PlanRequest(MEMORY_BYTES, solver=SOLVER, time_limit=SOLVER_SECONDS), line), path)
        plan = load_plan(path)
        replayed = verify_plan(
            plan,
            session.graph,
            session.fingerprints,
            seconds=session.instruction_costs,
            allowed=session.allowed_strategies,
        )
    return plan, str(replayed.violations[0]) if replayed.violations else "ok"


def demo_report(plan: Plan, checker: str, report: RunReport) -> dict[str, Any]:
    """Content of the demo's report: figures of the certificate and of the run, in seconds and bytes."""
    return {
        "status": str(plan.record.certificate.status),
        "objective_s": plan.objective_seconds,
        "bound_s": plan.bound_seconds,
        "gap": plan.gap,
        "proof": None if plan.record.certificate.proof is None else str(plan.record.certificate.proof),
        "checker": checker,
        **report.model_dump(
            include={
                "predicted_peak_bytes",
                "measured_peak_bytes",
                "predicted_step_s",
                "measured_step_s",
                "loss",
                "reference_loss",
                "max_grad_rel_error",
            }
        ),
    }


if __name__ == "__main__":
    sys.exit(main())
