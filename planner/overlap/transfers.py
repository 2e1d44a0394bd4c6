"""Transfers of a schedule that may run beside its computation: gathers of inputs, and reductions of gradients.

A *gather* brings a parameter or another input of the step to the placement that an operator needs: its source is there
from the start. A *reduction* brings a gradient to its parameter's placement: nothing but the update reads the result.
Resharded activations are no transfers, since both their sides are on the way of the computation.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

from planner.graph.operator_graph import OperatorGraph
from planner.replay.structure import communicating_steps
from planner.schedule.instructions import Compute, Instruction, Reshard, Schedule, Update, creates, reads


@dataclass(frozen=True, slots=True)
class Transfer:
    """A resharding with the views before and behind it, as instructions without an operator of its own between them.

    Parameters
    ----------
    reshard
        Position of the resharding in the schedule.
    before, behind
        Positions of the views that lead to its source, and of those that lead from its target.
    is_gather
        Whether its source is an input of the step, else it is the reduction of a gradient.
    needed
        Position of the first instruction that reads the result.
    """

    reshard: int
    before: tuple[int, ...]
    behind: tuple[int, ...]
    is_gather: bool
    needed: int

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of all its instructions."""
        return (*self.before, self.reshard, *self.behind)


def transfers(graph: OperatorGraph, schedule: Schedule) -> tuple[Transfer, ...]:
    """Transfers of a schedule in their order; each communicates."""
    uses = _Uses(graph, schedule.instructions)
    found = (
        uses.transfer(at, set(schedule.inputs))
        for at, entry in enumerate(schedule.instructions)
        if isinstance(entry, Reshard) and not entry.overlapped and communicating_steps(entry.path)
    )
    return tuple(transfer for transfer in found if transfer is not None)


class _Uses:
    """Creators and readers of buffers."""

    def __init__(self, graph: OperatorGraph, instructions: tuple[Instruction, ...]) -> None:
        self._graph, self._instructions = graph, instructions
        self._made: dict[int, int] = {}
        self._readers: Mapping[int, list[int]] = defaultdict(list)
        for at, entry in enumerate(instructions):
            self._made.update((buffer, at) for buffer in creates(entry))
            if isinstance(entry, (Compute, Reshard, Update)):
                for buffer in reads(entry):
                    self._readers[buffer].append(at)

    def transfer(self, at: int, inputs: set[int]) -> Transfer | None:
        """The transfer of a resharding, or None where it is of neither kind."""
        reshard = self._instructions[at]
        assert isinstance(reshard, Reshard)
        root, before = reshard.source, list[int]()
        while root in self._made and self._is_view(self._made[root]) and len(self._readers[root]) == 1:
            before.insert(0, self._made[root])
            root = reads(self._instructions[before[0]])[0]
        result, behind = reshard.target, list[int]()
        while len(self._readers[result]) == 1 and self._is_view(self._readers[result][0]):
            behind.append(self._readers[result][0])
            (result,) = creates(self._instructions[behind[-1]])
        readers = self._readers[result]
        if not readers:
            return None
        is_reduction = len(readers) == 1 and isinstance(self._instructions[readers[0]], Update)
        if root not in inputs and not is_reduction:
            return None
        return Transfer(at, tuple(before), tuple(behind), root in inputs and not is_reduction, min(readers))

    def _is_view(self, at: int) -> bool:
        entry = self._instructions[at]
        return isinstance(entry, Compute) and self._graph.operators[entry.operator].is_view and len(creates(entry)) == 1


def single_steps(schedule: Schedule, reshard: Reshard, first_new: int) -> tuple[Reshard, ...]:
    """A resharding as one per step of its path; buffers between steps are numbered from ``first_new``.

    Those of steps that communicate are overlapped.
    """
    steps = list(pairwise(reshard.path))
    between = [first_new + k for k in range(len(steps) - 1)]
    ends = pairwise([reshard.source, *between, reshard.target])
    return tuple(
        Reshard(source, target, (old, new), overlapped=communicating_steps((old, new)) == 1)
        for (source, target), (old, new) in zip(ends, steps, strict=True)
    )
