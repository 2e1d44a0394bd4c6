r"""CAPTURE's problem as an integer program: which stages partition the layers and the GPUs, least rank of the fullest.

A column is a stage at its place: layers ``first .. end - 1`` in configuration ``c`` on the GPUs from ``g`` on, with a
number of stages behind it. These are arcs between states (stages behind, layers placed, GPUs filled), and a plan is a
flow of one from the first state to the last; so every layer and every GPU has one stage, and stages fill the nodes in
order, as section III-C asks. The paper enumerates plans and has no equations.

Bytes are replaced by their ranks among all stages' bytes: the order is all that counts, and ranks are small integers.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from formulations.capture.problem import PartitionProblem
from formulations.encodings.integer_program import IntegerProgram
from formulations.encodings.pyomo_program import PyomoProgram, Values, add_rows
from formulations.problem.gc_pause import gc_paused
from formulations.problem.strategy_problem import IntArray

__all__ = ["PlacementProgram", "RankedPartition"]

State = tuple[int, int, int]
"""Stages behind, layers placed, GPUs filled."""


class _Arc(NamedTuple):
    """A stage at its place; an index of the program's columns."""

    first: int
    end: int
    configuration: int
    gpu: int
    behind: int


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

    def rank(self, stages: tuple[int, ...]) -> int:
        """Return the highest rank of a plan of :meth:`stages`."""
        rows, first, found = len(self.ranks) - 1, 0, 0
        count = len(stages) // 2
        for position in range(count):
            end, configuration = stages[2 * position : 2 * position + 2]
            found = max(found, int(self.ranks[min(count - 1 - position, rows), configuration, first, end]))
            first = end
        return found

    def arcs(self, highest: int | None = None) -> list[_Arc]:
        """Return stages at all places that a plan can reach from behind; none if no plan can begin with one.

        Parameters
        ----------
        highest
            Stages of higher rank are left out; None: none are.
        """
        gpus = len(self.room)
        most = int(self.ranks.max(initial=0)) if highest is None else highest
        reached = {(0, self.layers, gpus)}
        arcs = []
        for gpu in reversed(range(gpus)):
            fitting = np.flatnonzero(self.degrees <= self.room[gpu]).tolist()
            found = set()
            for configuration in fitting:
                filled = gpu + int(self.degrees[configuration])
                for behind, end, _ in sorted(state for state in reached if state[2] == filled):
                    for first in range(end):
                        if 0 <= int(self.ranks[behind, configuration, first, end]) <= most:
                            arc = _Arc(first, end, configuration, gpu, behind)
                            found.add(self.before(arc))
                            arcs.append(arc)
            reached |= found
        return arcs if any((arc.first, arc.gpu) == (0, 0) for arc in arcs) else []

    def before(self, arc: _Arc) -> State:
        """State in front of a stage."""
        return min(arc.behind + 1, len(self.ranks) - 1), arc.first, arc.gpu

    def after(self, arc: _Arc) -> State:
        """State behind a stage."""
        return arc.behind, arc.end, arc.gpu + int(self.degrees[arc.configuration])


class PlacementProgram:
    """The Pyomo model of a ranked problem that has arcs, :attr:`model`, and its integer program.

    Parameters
    ----------
    ranked
        The problem.
    highest
        Stages of higher rank are left out and the rest costs nothing; None: the highest rank used is minimised.

    Raises
    ------
    ValueError
        If no plan can begin.
    """

    def __init__(self, ranked: RankedPartition, highest: int | None = None) -> None:
        from pyomo.core import Binary, ConcreteModel, NonNegativeIntegers, Objective, Var

        self.ranked, self._arcs = ranked, ranked.arcs(highest)
        if not self._arcs:
            raise ValueError("no stage can begin with the first layer and GPU; there is no program")
        self._begins: dict[State, list[_Arc]] = {}
        self._ends: dict[State, list[_Arc]] = {}
        for arc in self._arcs:
            self._begins.setdefault(ranked.before(arc), []).append(arc)
            self._ends.setdefault(ranked.after(arc), []).append(arc)
        last = (0, ranked.layers, len(ranked.room))
        between = [s for s in sorted(self._begins.keys() | self._ends.keys()) if s != last and s[1:] != (0, 0)]
        self.model: Any = ConcreteModel(name="capture")
        m = self.model
        with gc_paused():
            m.x = Var(self._arcs, domain=Binary)
            add_rows(m, self.one_stage_is_first)
            add_rows(m, self.next_stage_begins, between)
            if highest is None:
                m.T = Var(domain=NonNegativeIntegers, bounds=(0, int(ranked.ranks.max(initial=0))))
                add_rows(m, self.highest_rank, range(ranked.layers))
            m.rank = Objective(expr=m.T if highest is None else 0)
        self._program = PyomoProgram(m)

    def program(self) -> IntegerProgram:
        """Return the integer program."""
        return self._program.integer_program()

    def stages(self, values: Values) -> tuple[int, ...]:
        """Return end and configuration of every stage of a solution, one after the other."""
        self._program.load(values)
        chosen = sorted((arc for arc in self._arcs if self.model.x[arc].value > 0.5), key=lambda arc: arc.gpu)
        return tuple(number for arc in chosen for number in (arc.end, arc.configuration))

    def one_stage_is_first(self, m: Any) -> Any:
        """Section III-C, (1): one stage begins with the first layer and the first GPU."""
        return sum(m.x[arc] for arc in self._arcs if (arc.first, arc.gpu) == (0, 0)) == 1

    def next_stage_begins(self, m: Any, behind: int, layer: int, gpu: int) -> Any:
        """Section III-C, (1) and (2): where a stage ends the next one begins, at its layer and GPU."""
        begins, ends = (of.get((behind, layer, gpu), []) for of in (self._begins, self._ends))
        return sum(m.x[arc] for arc in begins) == sum(m.x[arc] for arc in ends)

    def highest_rank(self, m: Any, layer: int) -> Any:
        r"""Section III-C, the lowest peak: :math:`T \ge \sum_{a \ni l} rank_a x_a` for the stage of every layer."""
        holding = [arc for arc in self._arcs if arc.first <= layer < arc.end]
        return sum(self._rank(arc) * m.x[arc] for arc in holding) <= m.T

    def _rank(self, arc: _Arc) -> int:
        return int(self.ranked.ranks[arc.behind, arc.configuration, arc.first, arc.end])
