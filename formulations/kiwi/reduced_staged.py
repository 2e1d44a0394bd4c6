"""KIWI with reduced complexity in stages: the full problem's program with fewer computations and rule 1.

A second exact form of :mod:`formulations.step.kiwi_reduced` (true liveness), for the paper's instance: only
forward operators that backward reads may be computed again, once, in the stage of their first backward
reader ``H_i``, and of an operator and its input only one (equation 9).
"""

from __future__ import annotations

from typing import Any

from formulations.encodings.pyomo_program import add_rows
from formulations.kiwi.full_staged import StagedModel


class ReducedStagedModel(StagedModel):
    """The reduced problem of a graph under a memory limit; arguments and errors as of :class:`StagedModel`."""

    def build(self, m: Any) -> None:
        """Add (9) to what the full problem has."""
        super().build(m)
        candidates = self.graph.candidates
        add_rows(
            m, self.inputs_are_kept, [(i, j) for i in candidates for j in self.graph.parents[i] if j in candidates]
        )

    def may_compute_again(self, t: int, i: int) -> bool:
        """Whether this is the stage of a candidate's first backward reader."""
        return i in self.graph.candidates and t == self.graph.first_backward_use[i]

    def inputs_are_kept(self, m: Any, i: int, j: int) -> Any:
        r"""(9): of operator ``i`` and its input ``j`` at most one is computed again."""
        use = self.graph.first_backward_use
        return sum(m.A[use[k], k, u] for k in (i, j) for u in self.levels[k]) <= 1
