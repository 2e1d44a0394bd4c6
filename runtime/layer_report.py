"""What a run of a layer plan found."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from planner.layer_plan import LayerPlan
from runtime.comparison import NO_ERROR, WorstError
from runtime.reference import ReferenceRun
from runtime.run_report import CHECK_FAILED, GRADIENT_TOLERANCE, LOSS_TOLERANCE, PRECISION


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")


class LayerRankReport(_Part):
    """What one rank measured; `compared` counts the entries of gradients compared with one process, by name."""

    losses: tuple[float, ...]
    measured_peak_bytes: int
    measured_host_peak_bytes: int
    resident_set_bytes: int
    measured_step_s: float | None
    grad_rel_error: float
    worst_gradient: str
    compared: dict[str, int]


class LayerRunReport(_Part):
    """A run of a layer plan; lists are by rank or by step.

    Parameters
    ----------
    devices, stages, micro_batches, device, dtype, steps
        How it was run.
    measured_peak_bytes, measured_host_peak_bytes
        Most bytes of tensors alive at once on a rank, and in host memory for it.
    resident_set_bytes
        Largest resident set of each rank's process.
    measured_step_s
        Median seconds of a step on the slowest rank; None with one step.
    loss, reference_loss
        Loss of each step, and that of one process (None where not checked).
    max_grad_rel_error, worst_gradient
        Largest relative error of the first step's gradients, and whose it is.
    uncompared
        Gradients of one process that no stage covers.
    """

    devices: int
    stages: int
    micro_batches: int
    device: str
    dtype: str
    steps: int
    measured_peak_bytes: list[int]
    measured_host_peak_bytes: list[int]
    resident_set_bytes: list[int]
    measured_step_s: float | None
    loss: list[float]
    reference_loss: list[float] | None
    max_grad_rel_error: float | None
    worst_gradient: str
    uncompared: list[str]

    @property
    def exit_code(self) -> int:
        """Exit code of the process that made the run: 1 where something is wrong."""
        return CHECK_FAILED if self.failures() else 0

    def failures(self) -> list[str]:
        """What differs from one process, one line each; the tolerances are those of operator plans."""
        if self.reference_loss is None or self.max_grad_rel_error is None:
            return []
        coarser = PRECISION[self.dtype]
        found = [f"gradient of {name} was made by no stage" for name in self.uncompared]
        first, expected = self.loss[0], self.reference_loss[0]
        error = abs(first - expected) / (abs(expected) or 1.0)
        if not error <= LOSS_TOLERANCE * coarser:
            found.append(f"loss of the first step {first} differs from one process's {expected} by {error:.1e}")
        if not self.max_grad_rel_error <= GRADIENT_TOLERANCE * coarser:
            found.append(f"gradient of {self.worst_gradient} differs from one process by {self.max_grad_rel_error:.1e}")
        return found


def merged_layer_report(
    plan: LayerPlan,
    ranks: Sequence[LayerRankReport],
    device: str,
    reference: ReferenceRun | None,
    uncompared: list[str],
) -> LayerRunReport:
    """One report of all ranks' reports; `reference` is None where nothing was checked."""
    worst = NO_ERROR
    for rank in ranks:
        worst = worst.worse_of(WorstError(rank.grad_rel_error, rank.worst_gradient))
    times = [rank.measured_step_s for rank in ranks if rank.measured_step_s is not None]
    return LayerRunReport(
        devices=plan.devices,
        stages=len(plan.stages),
        micro_batches=plan.micro_batches,
        device=device,
        dtype=plan.model.dtype,
        steps=len(ranks[0].losses),
        measured_peak_bytes=[rank.measured_peak_bytes for rank in ranks],
        measured_host_peak_bytes=[rank.measured_host_peak_bytes for rank in ranks],
        resident_set_bytes=[rank.resident_set_bytes for rank in ranks],
        measured_step_s=max(times) if times else None,
        loss=list(ranks[0].losses),
        reference_loss=None if reference is None else list(reference.losses),
        max_grad_rel_error=None if reference is None else worst.error,
        worst_gradient=worst.name,
        uncompared=uncompared,
    )


def read_layer_report(path: Path) -> LayerRunReport:
    """Read what rank 0 wrote."""
    return LayerRunReport.model_validate_json(path.read_text(encoding="utf-8"))
