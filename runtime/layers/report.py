"""Report of a run of a layer plan."""

from __future__ import annotations

from runtime.measure.run_report import MeasuredRank, TrainingReport


class LayerRankReport(MeasuredRank):
    """One rank's report; `compared` counts the entries of gradients compared with one process, by name."""

    compared: dict[str, int]


class LayerRunReport(TrainingReport):
    """A run of a layer plan.

    Parameters
    ----------
    devices, stages, micro_batches
        How it was run.
    uncompared
        Gradients of one process that no stage covers.
    """

    devices: int
    stages: int
    micro_batches: int
    uncompared: list[str]

    def failures(self) -> list[str]:
        """Differences from one process, one line each; the tolerances are those of operator plans."""
        missing = [] if self.reference_loss is None else self.uncompared
        return [f"gradient of {name} was made by no stage" for name in missing] + super().failures()
