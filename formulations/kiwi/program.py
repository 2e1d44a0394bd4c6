"""What all programs of KIWI's problems share: a Pyomo model of a graph, solved as an integer program, read back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any

from formulations.encodings.integer_program import IntegerProgram
from formulations.encodings.pyomo_program import PyomoProgram, Values
from formulations.kiwi.graph import KiwiGraph
from formulations.kiwi.schedule import StagedDecision
from formulations.problem.gc_pause import gc_paused

Moment = tuple[int, int]
"""A stage, counted from 0, and an operator that is computed in it."""


class KiwiProgram(ABC):
    """A problem on a graph under a memory limit; :attr:`model` is its Pyomo model.

    Operators have the graph's numbers, in the models too: ``V`` holds those that run. Memory is counted in the graph's
    byte units, costs in its quanta.

    Parameters
    ----------
    graph
        The instance.
    memory_limit
        Bytes on one device.
    """

    def __init__(self, graph: KiwiGraph, memory_limit: int) -> None:
        from pyomo.core import ConcreteModel  # not pyomo.environ, which loads plugins for a third of a second

        self.graph, self.memory_limit = graph, memory_limit
        self.room = memory_limit // graph.byte_unit
        self.first = graph.residents
        self.cost = [operator.cost.tolist() for operator in graph.operators]
        self.mem = [(operator.output_bytes // graph.byte_unit).tolist() for operator in graph.operators]
        self.model: Any = ConcreteModel(name=graph.name)
        with gc_paused():
            self.build(self.model)
        self._program = PyomoProgram(self.model)

    def most(self, operator: int) -> int:
        """Bytes that (8) and (16) allow once an operator has run; any where its extras say what is freed by then."""
        alone = operator < self.first or self.graph.counts_outputs_alone(operator)
        return self.room if alone else max(self.room, self.graph.most_bytes // self.graph.byte_unit)

    @abstractmethod
    def build(self, m: Any) -> None:
        """Add variables, objective and constraints to an empty model."""

    @abstractmethod
    def read(self, m: Any) -> StagedDecision:
        """Read a decision from the values of the variables."""

    def program(self) -> IntegerProgram:
        """Return the program; a relaxation until there is nothing to refine."""
        return self._program.integer_program()

    def decision(self, values: Values) -> StagedDecision:
        """Read a decision from a solution of :meth:`program`; computations without use are left out."""
        self._program.load(values)
        return self.read(self.model)

    def refine(self, over: Iterable[Moment]) -> bool:
        """Add rows for moments that the replay of a decision found over the limit; whether any was new.

        Parameters
        ----------
        over
            Moments of the replay of a :meth:`decision` that exceed the limit.
        """
        return False
