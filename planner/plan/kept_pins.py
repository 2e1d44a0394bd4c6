"""Does a schedule keep the pins that its plan names: checked on its instructions, without any solver's tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from planner.common.root_name import shown
from planner.graph.names import inputs_named, operators_named
from planner.graph.operator_graph import Operator, OperatorGraph, Phase
from planner.graph.placement import Placement
from planner.plan.decision import HOLDINGS, Pin, is_placed
from planner.schedule.instructions import Compute, Offload, Schedule


def broken_pins(graph: OperatorGraph, schedule: Schedule, pins: Sequence[Pin]) -> Iterator[str]:
    """Pins that a schedule does not keep, with the operator that breaks them.

    A placement holds for the first output of every operator that a pin names, wherever it is computed. ``recompute``
    and ``offload`` of a module hold where one of its operators does it, since others need not be held at all.

    Parameters
    ----------
    graph
        The traced step.
    schedule
        The schedule, in the graph's indices.
    pins
        What it should keep.

    Yields
    ------
    str
        A sentence of a pin.
    """
    if not pins:
        return
    facts = _Facts(graph, schedule)
    for pin in pins:
        operators = [operator for operator in operators_named(graph, pin.target) if not operator.is_view]
        names = [value.index for value in inputs_named(graph, pin.target)]
        if not operators and not names:
            yield f"{pin}: nothing has this name"
        elif pin.decision in HOLDINGS:
            reason = facts.held_otherwise(pin, operators)
            if reason:
                yield f"{pin}: {reason}"
        else:
            wanted = tuple(pin.decision.split(","))
            for name, placement in facts.placements(operators, names):
                if is_placed(placement, wanted) is pin.forbids:
                    yield f"{pin}: {name} is placed as {','.join(placement)}"
                    break


class _Facts:
    """What a schedule does with operators and inputs."""

    def __init__(self, graph: OperatorGraph, schedule: Schedule) -> None:
        self.graph, self.schedule = graph, schedule
        computed = [entry for entry in schedule.instructions if isinstance(entry, Compute)]
        self.computed = computed
        self.recomputed = {entry.operator for entry in computed if entry.recompute}
        copied = {entry.source for entry in schedule.instructions if isinstance(entry, Offload)}
        self.offloaded = {entry.operator for entry in computed if copied.intersection(entry.outputs)}

    def placements(self, operators: Sequence[Operator], values: Sequence[int]) -> Iterator[tuple[str, Placement]]:
        """Name and placement of each first output of these operators, and of these inputs."""
        buffers = self.schedule.buffers
        for number in self.schedule.inputs:
            if buffers[number].value in values:
                yield self.graph.values[buffers[number].value].name, buffers[number].placement
        wanted = {operator.index: operator for operator in operators}
        for entry in self.computed:
            first = next((number for number in entry.outputs if number is not None), None)
            if entry.operator in wanted and first is not None:
                yield shown(wanted[entry.operator].identity), buffers[first].placement

    def held_otherwise(self, pin: Pin, operators: Sequence[Operator]) -> str:
        """Why outputs are not held as a pin says; empty where they are."""
        doing = {"recompute": self.recomputed, "offload": self.offloaded}.get(pin.decision)
        forward = [operator for operator in operators if operator.phase is Phase.FORWARD]
        if doing is None:
            other = [operator for operator in forward if operator.index in self.recomputed | self.offloaded]
            if pin.forbids:
                return "" if other else "all of it is kept"
            return f"{shown(other[0].identity)} is not kept" if other else ""
        does = [operator for operator in forward if operator.index in doing and self._is_read_by_backward(operator)]
        if pin.forbids:
            return f"{shown(does[0].identity)} does" if does else ""
        return "" if does else "none of its operators does"

    def _is_read_by_backward(self, operator: Operator) -> bool:
        """Whether an operator of backward reads an output, or a view of one."""
        ahead = [value for value in operator.outputs if value is not None]
        for reader in self.graph.operators[operator.index + 1 :]:
            if any(value in ahead for value in reader.inputs):
                if reader.phase is Phase.BACKWARD:
                    return True
                if reader.is_view:
                    ahead += [value for value in reader.outputs if value is not None]
        return False
