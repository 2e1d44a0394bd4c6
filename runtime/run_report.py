"""What a run of a plan found, beside what the plan predicted."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from formulations.files import write_text_atomically

LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
"""Largest relative differences to one process that pass in single precision; see :meth:`RunReport.failures`."""

LIMIT_TOLERANCE = 1e-3
"""Share of the memory limit by which a measured peak may be above it: sizes that only running code shows."""

CHECK_FAILED = 1

PRECISION = {"float64": 1.0, "float32": 1.0, "float16": 2.0**13, "bfloat16": 2.0**16}
"""Rounding of a dtype relative to single precision (double precision is held to the same tolerance)."""


class RankReport(BaseModel):
    """What one rank measured, and its largest relative errors and where they are (0 where nothing was checked)."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    losses: tuple[float, ...]
    measured_peak_bytes: int
    measured_host_peak_bytes: int
    resident_set_bytes: int
    measured_step_s: float | None
    grad_rel_error: float
    worst_gradient: str
    param_rel_error: float
    worst_parameter: str


class RunReport(BaseModel):
    """A run of a plan; lists are by rank or by step.

    Parameters
    ----------
    plan_digest
        Digest of the plan's decision.
    mesh, device, dtype, steps
        How it was run.
    memory_limit_bytes
        Most bytes of tensors that the plan may use on a rank (None: no limit).
    predicted_peak_bytes, measured_peak_bytes
        Most bytes of tensors alive on a rank at once.
    predicted_host_peak_bytes, measured_host_peak_bytes
        Most bytes of offloaded tensors in host memory at once, of each rank.
    resident_set_bytes
        Largest resident set of each rank's process, all of Python and torch included.
    predicted_step_s, measured_step_s
        Seconds of one step; measured is the slowest rank's median (None with one step).
    predicted_stall_s
        Seconds of the predicted step in which the computation waits for copies to and from the host.
    loss, reference_loss
        Loss of each step, and that of one process (None where not checked).
    max_grad_rel_error, worst_gradient
        Largest relative error of the gradients of the first step, and whose it is.
    max_param_rel_error, worst_parameter
        The same of parameters and module buffers after the last step; see :mod:`runtime.comparison`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    plan_digest: str
    mesh: tuple[int, ...]
    device: str
    dtype: str
    steps: int
    memory_limit_bytes: int | None
    predicted_peak_bytes: list[int]
    measured_peak_bytes: list[int]
    predicted_host_peak_bytes: list[int]
    measured_host_peak_bytes: list[int]
    resident_set_bytes: list[int]
    predicted_step_s: float
    predicted_stall_s: float
    measured_step_s: float | None
    loss: list[float]
    reference_loss: list[float] | None
    max_grad_rel_error: float | None
    worst_gradient: str
    max_param_rel_error: float | None
    worst_parameter: str

    @property
    def excess_bytes(self) -> int:
        """Bytes by which the largest measured peak is above the memory limit; 0 where it is not."""
        if self.memory_limit_bytes is None:
            return 0
        return max(0, max(self.measured_peak_bytes) - self.memory_limit_bytes)

    @property
    def exit_code(self) -> int:
        """Exit code of the command that made the run: 1 where something is wrong."""
        return CHECK_FAILED if self.failures() else 0

    def failures(self) -> list[str]:
        """What is wrong with the run, one line each; empty where all is well.

        No rank's peak may be above the memory limit by more than 0.1 %. The rest needs a check: the first step's
        loss must be within 1e-5 of one process and its gradients within 1e-4 (relative, in single precision; more
        in half precision). Later losses and updated parameters are reported only: AdamW turns rounding differences
        of tiny gradients into differences of the size of the learning rate.
        """
        found = []
        if self.memory_limit_bytes is not None and self.excess_bytes > LIMIT_TOLERANCE * self.memory_limit_bytes:
            found.append(
                f"rank {self.measured_peak_bytes.index(max(self.measured_peak_bytes))} needed "
                f"{max(self.measured_peak_bytes)} bytes, the plan's memory limit is {self.memory_limit_bytes}"
            )
        if self.reference_loss is None or self.max_grad_rel_error is None:
            return found
        coarser = PRECISION[self.dtype]
        first, expected = self.loss[0], self.reference_loss[0]
        error = abs(first - expected) / (abs(expected) or 1.0)
        if not error <= LOSS_TOLERANCE * coarser:
            found.append(f"loss of the first step {first} differs from one process's {expected} by {error:.1e}")
        if not self.max_grad_rel_error <= GRADIENT_TOLERANCE * coarser:
            found.append(f"gradient of {self.worst_gradient} differs from one process by {self.max_grad_rel_error:.1e}")
        return found


def write_report(report: RunReport, path: Path) -> None:
    """Write a report as JSON, completely or not at all."""
    write_text_atomically(path, report.model_dump_json(indent=2) + "\n")


def read_report(path: Path) -> RunReport:
    """Read what :func:`write_report` wrote."""
    return RunReport.model_validate_json(path.read_text(encoding="utf-8"))
