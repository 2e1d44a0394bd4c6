"""KIWI with reduced complexity in stages: the full problem's program with fewer computations and rule 1.

A second exact form of :mod:`formulations.step.kiwi_reduced` (true liveness), for the paper's instance: only
forward operators that backward reads may be computed again, once, in the stage of their first backward
reader, and of an operator and its input only one (equation 9).
"""

from __future__ import annotations

from formulations.kiwi.full_staged import StagedModel
from formulations.kiwi.graph import KiwiGraph


class ReducedStagedModel(StagedModel):
    """The program of a graph under a memory limit; arguments and errors as of :class:`StagedModel`."""

    def __init__(self, graph: KiwiGraph, memory_limit: int) -> None:
        self._candidates = frozenset(graph.candidates)
        super().__init__(graph, memory_limit)
        for i in graph.candidates:
            for j in graph.parents[i]:
                if j in self._candidates:
                    self.forbid_both(self._moment(i), self._moment(j))

    def may_compute_again(self, stage: int, operator: int) -> bool:
        """Whether this is the stage of a candidate's first backward reader."""
        return operator in self._candidates and self._moment(operator) == (stage, operator)

    def _moment(self, operator: int) -> tuple[int, int]:
        """Stage and operator of the one recomputation."""
        return self.graph.first_backward_use[operator] - self.graph.residents, operator
