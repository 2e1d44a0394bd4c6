"""Construction of the explicit schedule of a decision (layouts and recomputed operators).

Walks the timeline of the decision: at every event the arguments are brought to the placements that the
operator's layout requires, along the routes whose costs the model used; then the operator computes.
Values are freed at their last use.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from formulations.step.timeline import EventKind, build_timeline
from formulations.step.training_step import StepDecision
from planner.graph.operator_graph import OperatorGraph, OutputRole
from planner.graph.placement import Placement, replicated
from planner.schedule.frees import with_frees
from planner.schedule.instructions import (
    Buffer,
    Compute,
    Instruction,
    Reshard,
    Schedule,
    Update,
)
from planner.strategies.space import StrategySpace


def build_schedule(space: StrategySpace, decision: StepDecision) -> Schedule:
    """Schedule of a decision.

    Parameters
    ----------
    space
        The strategies that the decision's layouts index.
    decision
        One layout per node and the operators to recompute.

    Returns
    -------
    Schedule
        Every instruction of one training step, with frees at last uses.
    """
    return _ScheduleBuilder(space, decision).build()


@dataclass
class _ScheduleBuilder:
    space: StrategySpace
    decision: StepDecision
    buffers: list[Buffer] = field(default_factory=list)
    instructions: list[Instruction] = field(default_factory=list)
    current: dict[int, int] = field(default_factory=dict)
    """Buffer that holds the newest version of each base value."""

    def build(self) -> Schedule:
        space, graph = self.space, self.space.graph
        inputs = []
        for k, value in enumerate(graph.inputs):
            placement = space.strategies[k][self.decision.layouts[k]].outputs[0]
            assert placement is not None
            self.current[value] = self._new_buffer(value, placement)
            inputs.append(self.current[value])

        gradient_outputs = [output for output in graph.outputs if output.role is OutputRole.GRADIENT]
        other_outputs = [output for output in graph.outputs if output.role is not OutputRole.GRADIENT]
        whole = replicated(len(space.mesh))
        result_of: dict[tuple[int, int | None], int] = {}
        gradient_of_node: dict[int, int] = {}
        for event in build_timeline(space.model, self.decision.recomputed).events:
            if event.kind in (EventKind.COMPUTE, EventKind.RECOMPUTE):
                self._compute(event.index, event.kind is EventKind.RECOMPUTE)
            elif event.kind is EventKind.RESULT:
                output = other_outputs[event.index]
                result_of[output.value, output.of] = self._argument(output.value, whole)
            elif event.kind is EventKind.GRADIENT:
                output = gradient_outputs[event.index]
                assert output.of is not None
                parameter = self.current[output.of]
                gradient = self._argument(output.value, self.buffers[parameter].placement)
                result_of[output.value, output.of] = gradient
                gradient_of_node[space.node_of_value[output.of]] = gradient
            else:
                updated = space.nodes[event.index].value
                assert updated is not None, "only parameters are updated"
                self.instructions.append(Update(self.current[updated], gradient_of_node[event.index]))
        results = tuple(result_of[output.value, output.of] for output in graph.outputs)
        kept = kept_buffers(graph, inputs, results)
        return Schedule(
            space.mesh,
            tuple(self.buffers),
            tuple(inputs),
            with_frees(self.instructions, kept),
            results,
        )

    def _new_buffer(self, value: int, placement: Placement) -> int:
        self.buffers.append(Buffer(value, placement))
        return len(self.buffers) - 1

    def _compute(self, node: int, again: bool) -> None:
        """Emit one execution of an operator and make its outputs the newest versions."""
        index = self.space.nodes[node].operator
        assert index is not None
        operator = self.space.graph.operators[index]
        strategy = self.space.strategies[node][self.decision.layouts[node]]
        arguments = tuple(
            self._argument(value, placement) for value, placement in zip(operator.inputs, strategy.inputs, strict=True)
        )
        outputs: list[int | None] = []
        for value, placement in zip(operator.outputs, strategy.outputs, strict=True):
            if value is None:
                outputs.append(None)
                continue
            assert placement is not None
            self.current[value] = self._new_buffer(value, placement)
            outputs.append(self.current[value])
        self.instructions.append(Compute(index, arguments, tuple(outputs), again))

    def _argument(self, value: int, target: Placement) -> int:
        """Emit the views and the resharding that bring ``value`` to ``target``."""
        space, graph = self.space, self.space.graph
        chain = space.chains[value]
        buffer = self.current[chain.base]
        route = space.router.route(chain, self.buffers[buffer].placement, target)
        assert route is not None, f"no route for {graph.values[value].name}"
        placements = [*route.before, *route.after]
        position = len(route.before) - 1
        for k in range(len(chain.steps) + 1):
            if k == position and route.reshards:
                copy = self._new_buffer(self.buffers[buffer].value, route.path[-1])
                self.instructions.append(Reshard(buffer, copy, route.path))
                buffer = copy
            if k < len(chain.steps):
                buffer = self._view(chain.steps[k].operator, chain.steps[k].output, buffer, placements[k + 1])
        return buffer

    def _view(self, index: int, followed: int, source: int, placement: Placement) -> int:
        """Emit one view; outputs that the chain does not follow are not created."""
        operator = self.space.graph.operators[index]
        outputs: list[int | None] = [None] * len(operator.outputs)
        value = operator.outputs[followed]
        assert value is not None
        buffer = self._new_buffer(value, placement)
        outputs[followed] = buffer
        self.instructions.append(Compute(index, (source,), tuple(outputs)))
        return buffer


def kept_buffers(graph: OperatorGraph, inputs: Iterable[int], results: Iterable[int]) -> set[int]:
    """Buffers of a schedule that are never freed: inputs of the step, and its results other than gradients."""
    return {*inputs} | {
        buffer for output, buffer in zip(graph.outputs, results, strict=True) if output.role is not OutputRole.GRADIENT
    }
