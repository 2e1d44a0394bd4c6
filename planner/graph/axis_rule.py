"""One way to run one operator on one mesh axis."""

from __future__ import annotations

from dataclasses import dataclass

from planner.graph.placement import is_partial


@dataclass(frozen=True, slots=True)
class AxisRule:
    """Words of an operator's tensors on ONE mesh axis under which local operators give the right result.

    Parameters
    ----------
    outputs
        Word per returned tensor, None where the operator returns none there.
    inputs
        Word per tensor argument, in the order of ``Operator.inputs``.
    collectives
        Communication inside the local operator on that axis: (kind, bytes of the buffer on one rank if
        no other axis shards anything).
    """

    outputs: tuple[str | None, ...]
    inputs: tuple[str, ...]
    collectives: tuple[tuple[str, int], ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """Words of all tensors, outputs first."""
        return tuple(word for word in self.outputs if word is not None) + self.inputs

    @property
    def sort_key(self) -> tuple[bool, int, tuple[str, ...], tuple[tuple[str, int], ...]]:
        """Order of rules: all-replicate first, rules without pending reductions before the others."""
        words = tuple(word or "" for word in self.outputs) + self.inputs
        replicate = all(word == "R" for word in self.words)
        return (not replicate, sum(map(is_partial, self.words)), words, self.collectives)
