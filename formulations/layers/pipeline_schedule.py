"""Schedules of a pipeline, and how many micro-batches a stage holds under each."""

from __future__ import annotations

from enum import StrEnum


class Schedule(StrEnum):
    """The order of forwards and backwards in a pipeline.

    ``ONE_F_ONE_B_IF_FILLED`` is what torch's engine runs: 1F1B needs as many micro-batches as stages, GPipe runs fewer.
    """

    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"
    ONE_F_ONE_B_IF_FILLED = "1f1b if filled"

    def in_flight(self, stages: int, position: int, micro_batches: int) -> int:
        """Micro-batches whose activations a stage holds at once; positions count from 0."""
        if stages == 1:
            return 1
        unfilled = self is Schedule.ONE_F_ONE_B_IF_FILLED and micro_batches < stages
        return micro_batches if unfilled or self is Schedule.GPIPE else min(micro_batches, stages - position)
