"""Tables of the plans of :mod:`planner.papers.claims.one_model`, run at full size: GPT-2 on four processes of a CPU.

Every plan trains one step. Its loss and gradients are compared with one process, and its peak of tensors with what the
plan predicts. Time is not compared, as the plans are made for other devices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from planner.common.infeasibility import InfeasibleError
from planner.common.plan_error import PlanError
from planner.layers.plan.document import LayerPlan
from planner.papers.cells import Row, Table
from planner.papers.claims.one_model import OneModelCase, case_cells, one_model_cases
from planner.plan.decision import decision_digest
from planner.plan.document import Plan
from runtime.job.process_group import LaunchError
from runtime.measure.rounding import loss_error
from runtime.prediction.validation import predicted_figures, run_steps

__all__ = ["one_model_runs"]

STEPS = 1
_MEASURED = frozenset({"predicted_bytes", "measured_bytes", "loss_error", "gradient_error"})


def one_model_runs(paper: str, cases: Callable[[str], Iterable[OneModelCase]] = one_model_cases) -> Table:
    """The table of one paper: a row for each of its cases that has a plan; equal plans run once.

    Rows have ``planner``, ``way`` and ``limit_gb`` as :func:`planner.papers.claims.one_model.one_model`;
    ``predicted_bytes`` and ``measured_bytes`` of the fullest device; ``loss_error`` and ``gradient_error`` beside one
    process, relative; ``failures``, the differences that are more than rounding; and in ``note`` why a plan did not
    run, as one that holds more than this machine has.

    Parameters
    ----------
    paper
        One of :data:`planner.papers.claims.claim.PAPERS`.
    cases
        From a paper to its cases: its decisions, or the baselines beside them.
    """
    return Table(lambda: case_cells(cases(paper), _rows), _MEASURED)


def _rows(case: OneModelCase) -> Iterator[Row]:
    try:
        plan = case.plan()
    except (PlanError, InfeasibleError):
        return
    row = case.row(plan)
    _, predicted = predicted_figures(case.label, plan)
    yield {name: row[name] for name in ("planner", "way", "limit_gb")} | {"predicted_bytes": predicted} | _run(plan)


_runs: dict[str, Row] = {}
"""What was measured, by the digest of the plan."""


def _run(plan: Plan | LayerPlan) -> Row:
    digest = decision_digest(plan.decision) if isinstance(plan, Plan) else plan.settings_digest()
    if digest not in _runs:
        _runs[digest] = _measured(plan)
    return _runs[digest]


def _measured(plan: Plan | LayerPlan) -> Row:
    try:
        report = run_steps(plan, STEPS, "cpu", check=True)
    except LaunchError as error:
        return {"measured_bytes": None, "loss_error": None, "gradient_error": None, "failures": [], "note": str(error)}
    assert report.reference_loss is not None
    return {
        "measured_bytes": max(report.measured_peak_bytes),
        "loss_error": loss_error(report.loss[0], report.reference_loss[0]),
        "gradient_error": report.max_grad_rel_error,
        "failures": report.failures(),
        "note": "",
    }
