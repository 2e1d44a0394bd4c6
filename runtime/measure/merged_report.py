"""Fields that reports of all kinds of plans share, merged from the measurements of the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from runtime.measure.reference import ReferenceRun
from runtime.measure.rounding import NO_ERROR, NO_ROUNDING, Rounding, WorstError, worst_of
from runtime.measure.run_report import MeasuredRank
from runtime.measure.steps import Measurement


def rank_measurements(
    measured: Measurement, errors: Mapping[str, float], rounding: Rounding = NO_ROUNDING
) -> dict[str, Any]:
    """Fields of a :class:`MeasuredRank`.

    Parameters
    ----------
    measured
        Times, losses and bytes.
    errors
        Relative errors of this rank's gradients by name; empty where nothing was checked.
    rounding
        Of one process.
    """
    worst = worst_of(errors, rounding)
    return {
        "losses": measured.losses,
        "measured_peak_bytes": measured.peak_bytes,
        "measured_host_peak_bytes": measured.host_peak_bytes,
        "resident_set_bytes": measured.resident_set_bytes,
        "timed_steps_s": measured.timed_steps,
        "grad_rel_error": worst.error,
        "worst_gradient": worst.name,
        "grad_tolerance": worst.tolerance,
        "loss_tolerance": rounding.loss_tolerance,
        "reserved_peak_bytes": measured.reserved_peak_bytes,
        "allocation_retries": measured.allocation_retries,
    }


def merged_measurements(ranks: Sequence[MeasuredRank], reference: ReferenceRun | None) -> dict[str, Any]:
    """All fields of a :class:`~runtime.measure.run_report.TrainingReport` except ``device`` and ``dtype``.

    Parameters
    ----------
    ranks
        Reports in the order of the ranks.
    reference
        Results of one process; None where nothing was checked.
    """
    worst = NO_ERROR
    for rank in ranks:
        worst = worst.worse_of(WorstError(rank.grad_rel_error, rank.worst_gradient, rank.grad_tolerance))
    times = [median(rank.timed_steps_s) for rank in ranks if rank.timed_steps_s]
    return {
        "steps": len(ranks[0].losses),
        "measured_peak_bytes": [rank.measured_peak_bytes for rank in ranks],
        "measured_host_peak_bytes": [rank.measured_host_peak_bytes for rank in ranks],
        "resident_set_bytes": [rank.resident_set_bytes for rank in ranks],
        "measured_step_s": max(times) if times else None,
        "timed_steps_s": [max(of_ranks) for of_ranks in zip(*(rank.timed_steps_s for rank in ranks), strict=True)],
        "loss": list(ranks[0].losses),
        "reference_loss": None if reference is None else list(reference.losses),
        "max_grad_rel_error": None if reference is None else worst.error,
        "worst_gradient": worst.name,
        "grad_tolerance": worst.tolerance,
        "loss_tolerance": ranks[0].loss_tolerance,
        "reserved_peak_bytes": _of_every_rank([rank.reserved_peak_bytes for rank in ranks]),
        "allocation_retries": _of_every_rank([rank.allocation_retries for rank in ranks]),
    }


def _of_every_rank(figures: Sequence[int | None]) -> list[int] | None:
    known = [figure for figure in figures if figure is not None]
    return known if len(known) == len(figures) else None
