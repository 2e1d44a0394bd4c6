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
from planner.replay.memory import LocalBytes
from planner.replay.structure import communicating_steps, is_all_reduce
from planner.schedule.instructions import Compute, Reshard, Schedule, Update, creates, reads


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
    owns_source
        Whether its source is a whole storage that nothing else reads, so that it may be reduced in place.
    """

    reshard: int
    before: tuple[int, ...]
    behind: tuple[int, ...]
    is_gather: bool
    needed: int
    owns_source: bool = False

    @property
    def positions(self) -> tuple[int, ...]:
        """Positions of all its instructions."""
        return (*self.before, self.reshard, *self.behind)


def transfers(graph: OperatorGraph, schedule: Schedule) -> tuple[Transfer, ...]:
    """Transfers of a schedule in their order; each communicates."""
    uses = _Uses(graph, schedule)
    found = (
        uses.transfer(at, set(schedule.inputs))
        for at, entry in enumerate(schedule.instructions)
        if isinstance(entry, Reshard) and not entry.overlapped and communicating_steps(entry.path)
    )
    return tuple(transfer for transfer in found if transfer is not None)


class _Uses:
    """Creators and readers of buffers."""

    def __init__(self, graph: OperatorGraph, schedule: Schedule) -> None:
        instructions = schedule.instructions
        self._graph, self._instructions, self._buffers = graph, instructions, schedule.buffers
        self._results, self._local_bytes = set(schedule.results), LocalBytes(graph, schedule.mesh)
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
        is_gather = root in inputs and not is_reduction
        return Transfer(at, tuple(before), tuple(behind), is_gather, min(readers), self._is_owned(root, reshard.source))

    def _is_owned(self, root: int, source: int) -> bool:
        """Whether views lead from all of a storage, which an operator made and nothing else reads, to a source."""
        made = self._made.get(root)
        if made is None or len(self._readers[root]) != 1 or root in self._results:
            return False
        entry = self._instructions[made]
        owns = isinstance(entry, Compute) and not self._graph.operators[entry.operator].is_view
        return owns and self._nbytes(root) == self._nbytes(source)

    def _nbytes(self, buffer: int) -> int:
        entry = self._buffers[buffer]
        return self._local_bytes(entry.value, entry.placement)

    def _is_view(self, at: int) -> bool:
        entry = self._instructions[at]
        return isinstance(entry, Compute) and self._graph.operators[entry.operator].is_view and len(creates(entry)) == 1


def single_steps(reshard: Reshard, first_new: int, owns_source: bool) -> tuple[Reshard, ...]:
    """A resharding as one per step of its path; buffers between steps are numbered from ``first_new``.

    Those of steps that communicate are overlapped, and those that reduce what nothing else reads are in place.
    """
    steps = list(pairwise(reshard.path))
    between = [first_new + k for k in range(len(steps) - 1)]
    ends = pairwise([reshard.source, *between, reshard.target])
    return tuple(
        Reshard(
            source,
            target,
            (old, new),
            overlapped=communicating_steps((old, new)) == 1,
            in_place=(owns_source or at > 0) and is_all_reduce((old, new)),
        )
        for at, ((source, target), (old, new)) in enumerate(zip(ends, steps, strict=True))
    )
