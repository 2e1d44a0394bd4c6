"""Names of buffers, operators and instructions in the messages of the replay."""

from __future__ import annotations

from planner.common.root_name import shown
from planner.graph.operator_graph import OperatorGraph
from planner.graph.placement import Placement
from planner.schedule.instructions import Compute, Free, Instruction, Offload, Prefetch, Reshard, Schedule, Update, Wait


def placement_text(placement: Placement) -> str:
    """For example ``[S0,R]``."""
    return f"[{','.join(placement)}]"


class Wording:
    """Names of buffers, operators and instructions by their stable identities."""

    def __init__(self, graph: OperatorGraph, schedule: Schedule) -> None:
        self._graph = graph
        self._schedule = schedule

    def value(self, index: int) -> str:
        """Stable name of a value."""
        return shown(self._graph.values[index].name)

    def operator(self, index: int) -> str:
        """Identity of an operator."""
        return shown(self._graph.operators[index].identity)

    def buffer(self, index: int) -> str:
        """A buffer by number, value and placement."""
        entry = self._schedule.buffers[index]
        return f"buffer {index} ({self.value(entry.value)} as {placement_text(entry.placement)})"

    def instruction(self, instruction: Instruction) -> str:
        """An instruction's kind and its operator or buffer."""
        match instruction:
            case Compute(operator, recompute=recompute):
                return f"{'recompute' if recompute else 'compute'} of {self.operator(operator)}"
            case Reshard(source):
                return f"reshard of {self.buffer(source)}"
            case Wait(buffer):
                return f"wait for {self.buffer(buffer)}"
            case Update(parameter):
                return f"update of {self.buffer(parameter)}"
            case Offload(source):
                return f"offload of {self.buffer(source)}"
            case Prefetch(source):
                return f"prefetch of {self.buffer(source)}"
            case Free():
                return "free"
