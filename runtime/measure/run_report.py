"""Report of a run of a plan: measured figures beside predicted ones."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from formulations.problem.files import write_text_atomically
from planner.common.units import format_bytes, format_seconds
from runtime.measure.rounding import GRADIENT_TOLERANCE, LOSS_TOLERANCE, loss_error

LIMIT_TOLERANCE = 1e-3
"""Share of the memory limit by which a measured peak may be above it: sizes that only running code shows, such as
what kernels hold while they run; a cluster's reserve has room for them."""

CHECK_FAILED = 1


class ReportError(ValueError):
    """A file that is no report of a run."""


class MeasuredRank(BaseModel):
    """Measurements of one rank, and the largest relative error of its gradients (0 where nothing was checked)."""

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    losses: tuple[float, ...]
    measured_peak_bytes: int
    measured_host_peak_bytes: int
    resident_set_bytes: int
    timed_steps_s: tuple[float, ...]
    grad_rel_error: float
    worst_gradient: str
    grad_tolerance: float = GRADIENT_TOLERANCE
    loss_tolerance: float = LOSS_TOLERANCE
    reserved_peak_bytes: int | None = None
    allocation_retries: int | None = None


class RankReport(MeasuredRank):
    """One rank's report of an operator plan's run: also updated parameters, and the time of each instruction."""

    param_rel_error: float
    worst_parameter: str
    instruction_ns: tuple[int, ...] | None = None


class TrainingReport(BaseModel):
    """Measurements of a run of any plan, beside one process; lists are by rank or by step.

    Parameters
    ----------
    device, dtype, steps
        How it was run.
    measured_peak_bytes, measured_host_peak_bytes
        Most bytes of tensors alive at once on each rank, and in host memory for it.
    resident_set_bytes
        Largest resident set of each rank's process, all of Python and torch included.
    measured_step_s
        Median seconds of a step on the slowest rank; None with one step.
    timed_steps_s
        Seconds of each step after the first, on the rank that was the slowest in it.
    loss, reference_loss
        Loss of each step, and that of one process (None where not checked).
    max_grad_rel_error, worst_gradient
        Relative error of the gradients of the first step that is largest beside its tolerance, and its parameter.
    grad_tolerance, loss_tolerance
        Relative errors up to which that gradient and the first loss pass (:mod:`runtime.measure.rounding`).
    reserved_peak_bytes, allocation_retries
        Of CUDA's allocator on each rank: most bytes that it held at once, and how often it gave free memory back and
        asked again; None on other devices.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, ser_json_inf_nan="constants")

    device: str
    dtype: str
    steps: int
    measured_peak_bytes: list[int]
    measured_host_peak_bytes: list[int]
    resident_set_bytes: list[int]
    measured_step_s: float | None
    timed_steps_s: list[float] = []
    loss: list[float]
    reference_loss: list[float] | None
    max_grad_rel_error: float | None
    worst_gradient: str
    grad_tolerance: float = GRADIENT_TOLERANCE
    loss_tolerance: float = LOSS_TOLERANCE
    reserved_peak_bytes: list[int] | None = None
    allocation_retries: list[int] | None = None

    def line(self, predicted_step_s: float | None, predicted_peak_bytes: int) -> str:
        """What was predicted and measured, in one line; a plan may predict no step, and no peak (0)."""
        step = [(predicted_step_s, "predicted"), (self.measured_step_s, "measured")]
        peak = [(predicted_peak_bytes or None, "predicted"), (max(self.measured_peak_bytes, default=None), "measured")]
        losses = f"loss {self.loss[0]:.6g} to {self.loss[-1]:.6g}" if self.loss else "no loss"
        times = ", ".join(f"{format_seconds(value)} {word}" for value, word in step if value is not None)
        peaks = ", ".join(f"{format_bytes(value)} {word}" for value, word in peak if value is not None)
        return f"step {times or 'not timed'}; peak {peaks or 'not measured'}; {losses}"

    @property
    def step_range(self) -> tuple[str, str] | None:
        """Name and value of a table's row of the fastest and the slowest step; None where no two were timed."""
        if len(self.timed_steps_s) < 2:
            return None
        fastest, slowest = (format_seconds(end(self.timed_steps_s)) for end in (min, max))
        return f"fastest, slowest of {len(self.timed_steps_s)} steps", f"{fastest}, {slowest}"

    @property
    def exit_code(self) -> int:
        """Exit code of the command that made the run: 1 where there are failures."""
        return CHECK_FAILED if self.failures() else 0

    def failures(self) -> list[str]:
        """Differences from one process, one line each; empty where there are none or nothing was checked.

        The first step's loss must be within 1e-5 of one process and its gradients within 1e-4, or within three times
        what rounding takes from one process's own. Later losses and updated parameters are reported only: AdamW turns
        rounding differences of tiny gradients into differences of the size of the learning rate.
        """
        if self.reference_loss is None or self.max_grad_rel_error is None:
            return []
        found = []
        first, expected = self.loss[0], self.reference_loss[0]
        error = loss_error(first, expected)
        if not error <= self.loss_tolerance:
            found.append(
                f"loss of the first step {first} differs from one process's {expected} by {error:.1e}, "
                f"more than {self.loss_tolerance:.1e}"
            )
        if not self.max_grad_rel_error <= self.grad_tolerance:
            found.append(
                f"gradient of {self.worst_gradient} differs from one process by {self.max_grad_rel_error:.1e}, "
                f"more than {self.grad_tolerance:.1e}"
            )
        return found


class RunReport(TrainingReport):
    """A run of an operator plan; lists are by rank or by step.

    Parameters
    ----------
    plan_digest
        Digest of the plan's decision.
    mesh
        Shape of the mesh.
    memory_limit_bytes
        Most bytes of tensors that the plan may use on a rank (None: no limit).
    predicted_peak_bytes, predicted_host_peak_bytes
        Most bytes of tensors alive on a rank at once, and of offloaded ones in host memory.
    predicted_step_s, predicted_stall_s
        Seconds of one step, and of its stalls for copies to and from the host.
    max_param_rel_error, worst_parameter
        Largest relative error of parameters and module buffers after the last step; see
        :mod:`runtime.measure.comparison`.
    instruction_ns
        Of each rank the median nanoseconds of each instruction of the schedule, waiting for other ranks included; None
        where they were not timed.
    """

    plan_digest: str
    mesh: tuple[int, ...]
    memory_limit_bytes: int | None
    predicted_peak_bytes: list[int]
    predicted_host_peak_bytes: list[int]
    predicted_step_s: float
    predicted_stall_s: float
    max_param_rel_error: float | None
    worst_parameter: str
    instruction_ns: list[tuple[int, ...]] | None = None

    @property
    def excess_bytes(self) -> int:
        """Bytes by which the largest measured peak is above the memory limit; 0 where it is not."""
        if self.memory_limit_bytes is None:
            return 0
        return max(0, max(self.measured_peak_bytes) - self.memory_limit_bytes)

    @property
    def exceeds_limit(self) -> bool:
        """Whether the largest measured peak is above the memory limit by more than the tolerance."""
        limit = self.memory_limit_bytes
        return limit is not None and self.excess_bytes > LIMIT_TOLERANCE * limit

    def failures(self) -> list[str]:
        """Failures of the run: a peak above the memory limit by more than 0.1 %, and differences from one process."""
        found = []
        if self.exceeds_limit:
            found.append(
                f"rank {self.measured_peak_bytes.index(max(self.measured_peak_bytes))} needed "
                f"{max(self.measured_peak_bytes)} bytes, the plan's memory limit is {self.memory_limit_bytes}"
            )
        return found + super().failures()


def read_report(path: Path) -> RunReport:
    """The report of a run of an operator plan.

    Raises
    ------
    ReportError
        The file cannot be read or is no such report.
    """
    try:
        return RunReport.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ValidationError) as error:
        first = str(error).splitlines()[0]
        raise ReportError(f"report {path} cannot be read as one of a plan of operators: {first}") from None


def write_report(report: TrainingReport, path: Path) -> None:
    """Write a report as JSON, completely or not at all."""
    write_text_atomically(path, report.model_dump_json(indent=2) + "\n")
