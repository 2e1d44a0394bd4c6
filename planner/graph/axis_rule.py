"""One way to run one operator on one mesh axis."""

from __future__ import annotations

from dataclasses import dataclass

from planner.graph.placement import AxisPlacement, is_partial


@dataclass(frozen=True, slots=True)
class AxisRule:
    """Placements of an operator's tensors on ONE mesh axis under which local operators give the right result.

    Parameters
    ----------
    outputs
        Axis placement per returned tensor, None where the operator returns none there.
    inputs
        Axis placement per tensor argument, in the order of ``Operator.inputs``.
    collectives
        Communication inside the local operator on that axis: (kind, bytes of the buffer on one rank if
        no other axis shards anything).
    """

    outputs: tuple[AxisPlacement | None, ...]
    inputs: tuple[AxisPlacement, ...]
    collectives: tuple[tuple[str, int], ...] = ()

    @property
    def placements(self) -> tuple[AxisPlacement, ...]:
        """Axis placements of all tensors, outputs first."""
        return tuple(entry for entry in self.outputs if entry is not None) + self.inputs

    @property
    def sort_key(self) -> tuple[bool, int, tuple[str, ...], tuple[tuple[str, int], ...]]:
        """Order of rules: all-replicate first, rules without pending reductions before the others."""
        placements = tuple(entry or "" for entry in self.outputs) + self.inputs
        replicate = all(entry == "R" for entry in self.placements)
        return (not replicate, sum(map(is_partial, self.placements)), placements, self.collectives)
