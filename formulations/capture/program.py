r"""CAPTURE's problem as an integer program: which stages partition the layers and the GPUs, least rank of the fullest.

A column is a stage at its place: layers ``first .. end - 1`` in configuration ``c`` on the GPUs from ``g`` on, with a
number of stages behind it. Columns are arcs between states (layers placed, GPUs filled, stages behind), and a plan is a
flow of one from the first state to the last (:meth:`RankedPartition._keep_order`); so every layer and every GPU has
one stage, and stages fill the nodes in order.

Bytes are replaced by their ranks among all stages' bytes: the order is all that counts, and ranks are small integers.
The least rank is at least that of the stage of every layer (:meth:`RankedPartition._bound_ranks`):

.. math:: T \ge \sum_{a \ni l} \mathrm{rank}_a x_a \quad \text{for every layer } l .
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from formulations.capture.problem import PartitionProblem
from formulations.encodings.integer_program import IntegerProgram, ProgramBuilder
from formulations.problem.strategy_problem import IntArray

__all__ = ["RankedPartition"]

State = tuple[int, int, int]


class _Arc(NamedTuple):
    """A stage at its place, and the states on both sides of it."""

    before: State
    after: State
    configuration: int
    rank: int


@dataclass(frozen=True, slots=True, eq=False)
class RankedPartition:
    """The problem with ranks in place of bytes.

    Parameters
    ----------
    degrees
        GPUs of configurations, shape ``(C,)``.
    room
        GPUs from each one to the end of its node, shape ``(G,)``.
    ranks
        By stages behind, configuration, first layer and end, shape ``(S, C, L, L + 1)``; -1 where impossible.
    """

    degrees: IntArray
    room: IntArray
    ranks: IntArray

    @classmethod
    def of(cls, problem: PartitionProblem) -> RankedPartition:
        """Rank the bytes of a problem."""
        allowed = np.broadcast_to(problem.allowed, problem.peaks.shape)
        ranks = np.searchsorted(np.unique(problem.peaks[allowed]), problem.peaks)
        return cls(problem.degrees, problem.room, np.where(allowed, ranks, -1))

    @classmethod
    def from_json(cls, text: str) -> RankedPartition:
        """Read what :meth:`to_json` wrote."""
        document = json.loads(text)
        return cls(*(np.array(document[name], dtype=np.int64) for name in ("degrees", "room", "ranks")))

    def to_json(self) -> str:
        """Write for transport to another process."""
        return json.dumps({"degrees": self.degrees.tolist(), "room": self.room.tolist(), "ranks": self.ranks.tolist()})

    @property
    def layers(self) -> int:
        """Number of layers."""
        return int(self.ranks.shape[2])

    def program(self, highest: int | None = None) -> tuple[IntegerProgram, list[_Arc]]:
        """Build the program.

        Parameters
        ----------
        highest
            Stages of higher rank are left out and the rest costs nothing; None: the highest rank used is minimised.

        Returns
        -------
        program, arcs
            The first columns are those of the arcs, in their order.
        """
        arcs = self._arcs(int(self.ranks.max(initial=0)) if highest is None else highest)
        builder = ProgramBuilder()
        columns = [builder.binary() for _ in arcs]
        self._keep_order(builder, arcs, columns)
        if highest is None:
            self._bound_ranks(builder, arcs, columns)
        return builder.build(), arcs

    def stages(self, arcs: list[_Arc], values: NDArray[np.float64]) -> tuple[int, ...]:
        """Return end and configuration of every stage of a solution, one after the other."""
        chosen = sorted(arc for arc, value in zip(arcs, values[: len(arcs)], strict=True) if value > 0.5)
        chosen.sort(key=lambda arc: arc.before[1])
        return tuple(number for arc in chosen for number in (arc.after[1], arc.configuration))

    def rank(self, stages: tuple[int, ...]) -> int:
        """Return the highest rank of a plan of :meth:`stages`."""
        rows, first, found = len(self.ranks) - 1, 0, 0
        count = len(stages) // 2
        for position in range(count):
            end, configuration = stages[2 * position : 2 * position + 2]
            found = max(found, int(self.ranks[min(count - 1 - position, rows), configuration, first, end]))
            first = end
        return found

    def _arcs(self, highest: int) -> list[_Arc]:
        """Stages at all places that a plan can reach from behind."""
        rows, gpus = len(self.ranks), len(self.room)
        reached = {(0, self.layers, gpus)}
        arcs = []
        for gpu in reversed(range(gpus)):
            fitting = np.flatnonzero(self.degrees <= self.room[gpu]).tolist()
            found = set()
            for configuration in fitting:
                filled = gpu + int(self.degrees[configuration])
                for behind, end, _ in sorted(state for state in reached if state[2] == filled):
                    for first in range(end):
                        rank = int(self.ranks[behind, configuration, first, end])
                        if 0 <= rank <= highest:
                            before = (min(behind + 1, rows - 1), first, gpu)
                            found.add(before)
                            arcs.append(_Arc(before, (behind, end, filled), configuration, rank))
            reached |= found
        return arcs

    def _keep_order(self, builder: ProgramBuilder, arcs: list[_Arc], columns: list[int]) -> None:
        """One stage begins with the first layer and GPU; where a stage ends, the next one begins."""
        begins: dict[State, list[int]] = {}
        ends: dict[State, list[int]] = {}
        for arc, column in zip(arcs, columns, strict=True):
            begins.setdefault(arc.before, []).append(column)
            ends.setdefault(arc.after, []).append(column)
        starts = [column for state, out in begins.items() if state[1:] == (0, 0) for column in out]
        builder.equal([(column, 1) for column in starts], 1)
        last = (0, self.layers, len(self.room))
        for state in begins.keys() | ends.keys():
            if state != last and state[1:] != (0, 0):
                out, into = begins.get(state, []), ends.get(state, [])
                builder.equal([*((column, 1) for column in out), *((column, -1) for column in into)], 0)

    def _bound_ranks(self, builder: ProgramBuilder, arcs: list[_Arc], columns: list[int]) -> None:
        """The objective is at least the rank of the stage that has a layer, for every layer."""
        least = builder.integer(0, int(self.ranks.max(initial=0)), 1)
        for layer in range(self.layers):
            holding = [
                (column, -arc.rank)
                for arc, column in zip(arcs, columns, strict=True)
                if arc.before[1] <= layer < arc.after[1]
            ]
            builder.at_least([(least, 1), *holding], 0)
