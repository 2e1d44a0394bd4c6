"""Figures of a plan as JSON, of operators or of layers."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.api import AnyPlan


def plan_document(plan: AnyPlan, file: Path | None = None) -> dict[str, Any]:
    """Figures of a plan, in seconds and bytes.

    Parameters
    ----------
    plan
        The plan.
    file
        Where it was written, or None.
    """
    from planner.layers.plan.document import LayerPlan

    common = {
        "objective_seconds": plan.objective_seconds,
        "bound_seconds": plan.bound_seconds,
        "gap": plan.gap,
        "peak_bytes": plan.peak_bytes,
    }
    if isinstance(plan, LayerPlan):
        record = plan.record
        figures: dict[str, Any] = {
            "model": plan.model.source,
            "formulation": None if record is None else record.formulation,
            "status": None if record is None else record.status,
            **common,
            "limit_bytes": None if record is None else record.tensor_bytes,
            "solver": None if record is None else record.solver,
            "solver_seconds": None if record is None else record.seconds,
            "batch": plan.model.batch,
            "devices": plan.devices,
            "stages": len(plan.stages),
            "micro_batches": plan.micro_batches,
            "notes": [] if record is None else list(record.notes),
        }
    else:
        options, certificate = plan.decision.options, plan.record.certificate
        figures = {
            "model": plan.decision.model.source,
            "formulation": options.formulation,
            **({"memory_model": options.memory_model} if options.memory_model else {}),
            "status": str(certificate.status),
            **common,
            "limit_bytes": options.limit_bytes,
            "proof": None if certificate.proof is None else str(certificate.proof),
            "solver": certificate.solver,
            "solver_seconds": certificate.seconds,
            "batch": plan.decision.model.batch * options.grad_accum,
            "mesh": list(options.mesh),
            "recomputed": plan.recomputed,
            "collectives": plan.collectives,
            "digest": plan.digest,
            "notes": list(plan.record.notes),
        }
    return figures if file is None else figures | {"out": str(file)}
