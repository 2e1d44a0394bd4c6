"""Candidates and modes of offload, and the links to the host."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from formulations.step.training_step import NodeKind, StepModel


class OffloadMode(StrEnum):
    """Mode of an offloaded activation; see :mod:`formulations.step.offload.model` and its relaxation."""

    AWAY = "away"
    AWAY_SOON = "away, back for the first rerun that may read it"
    EXPOSED = "exposed"
    EARLY = "early"
    EARLY_SOON = "early, back for the first rerun that may read it"
    LATE = "late"
    LATE_SOON = "late, back for the first rerun that may read it"
    BRIEF = "brief"

    @property
    def soon(self) -> bool:
        """Whether reruns before the first backward use may read the prefetched activation."""
        return self in (OffloadMode.AWAY_SOON, OffloadMode.EARLY_SOON, OffloadMode.LATE_SOON)


@dataclass(frozen=True, slots=True)
class AtMost:
    """The plans that a relaxation bounds.

    Parameters
    ----------
    cost
        The most that they cost, in quanta: that of the best known plan.
    device_bytes
        Their memory limit on one device, or None.
    """

    cost: int
    device_bytes: int | None


@dataclass(frozen=True, slots=True)
class Links:
    """Memory and links of the host.

    Parameters
    ----------
    host_bytes
        Pinned host memory for one device, or None.
    blocking
        Whether the computation waits for every copy.
    at_most
        Builds the relaxation, whose optimum is a bound on all of these plans; None builds the problem that finds plans.
    """

    host_bytes: int | None = None
    blocking: bool = False
    at_most: AtMost | None = None

    @property
    def relaxed(self) -> bool:
        """Whether the problem is the relaxation."""
        return self.at_most is not None and not self.blocking

    @property
    def modes(self) -> tuple[OffloadMode, ...]:
        """Modes of offload that there are."""
        if self.blocking:
            return (OffloadMode.EXPOSED,)
        if not self.relaxed:
            return OffloadMode.AWAY, OffloadMode.AWAY_SOON
        early, late = (OffloadMode.EARLY, OffloadMode.EARLY_SOON), (OffloadMode.LATE, OffloadMode.LATE_SOON)
        return (*early, *late, OffloadMode.BRIEF)


def offload_candidates(model: StepModel) -> frozenset[int]:
    """Operators whose outputs may be offloaded: made in forward, read in backward, worth a copy, no result."""
    return frozenset(
        i
        for i in np.flatnonzero(model.rerunnable).tolist()
        if model.first_backward_use[i] >= 0 and model.nodes[i].transfer_cost is not None
    )


def waiting_outputs(model: StepModel, node: int) -> list[int]:
    """Outputs of an operator that backward reads itself; of an offloaded operator only these are copied to the host."""
    edges = model.edges_from[node]
    return sorted({edge.output for edge in edges if model.nodes[edge.consumer].kind is NodeKind.BACKWARD})
