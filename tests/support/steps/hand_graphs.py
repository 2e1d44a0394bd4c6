"""Operator graphs and schedules made by hand: small enough to compute every byte of them on paper."""

from __future__ import annotations

from collections.abc import Sequence

from planner.graph.operator_graph import (
    GraphOutput,
    Operator,
    OperatorGraph,
    OutputRole,
    Phase,
    TensorSpec,
    Value,
    ValueRole,
)
from planner.graph.placement import Placement
from planner.schedule.instructions import (
    Buffer,
    Compute,
    Free,
    Instruction,
    Offload,
    Prefetch,
    Reshard,
    Schedule,
    Update,
)


def dense(shape: Sequence[int], dtype: str = "float32") -> TensorSpec:
    """Contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return TensorSpec(tuple(shape), tuple(reversed(strides)), dtype)


class GraphMaker:
    """Collects values and operators; every method returns value indices."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.operators: list[Operator] = []
        self.outputs: list[GraphOutput] = []

    def input(self, name: str, role: ValueRole, shape: Sequence[int], trainable: bool = False) -> int:
        self.values.append(Value(len(self.values), name, dense(shape), role, trainable=trainable))
        return len(self.values) - 1

    def parameter(self, name: str, shape: Sequence[int]) -> int:
        return self.input(name, ValueRole.PARAMETER, shape, trainable=True)

    def operator(
        self,
        target: str,
        inputs: Sequence[int],
        outputs: Sequence[tuple[Sequence[int], str] | None],
        phase: Phase = Phase.FORWARD,
        *,
        view: bool = False,
        random: bool = False,
    ) -> list[int]:
        index = len(self.operators)
        identity = f"net/{phase}/aten.{target}/{index}"
        made: list[int | None] = []
        for position, output in enumerate(outputs):
            if output is None:
                made.append(None)
                continue
            name = f"{identity}#{position}"
            spec = dense(*output)
            self.values.append(Value(len(self.values), name, spec, ValueRole.ACTIVATION, index, position))
            made.append(len(self.values) - 1)
        self.operators.append(
            Operator(index, identity, target, target, "net", phase, tuple(inputs), tuple(made), view, random, 1)
        )
        return [value for value in made if value is not None]

    def output(self, role: OutputRole, value: int, of: int | None = None) -> None:
        self.outputs.append(GraphOutput(role, value, of))

    def graph(self) -> OperatorGraph:
        inputs = tuple(value.index for value in self.values if value.producer is None)
        return OperatorGraph(tuple(self.values), tuple(self.operators), inputs, tuple(self.outputs))


class ScheduleMaker:
    """Collects buffers and instructions; every method returns buffer indices."""

    def __init__(self, graph: OperatorGraph, mesh: tuple[int, ...], inputs: Sequence[Placement]) -> None:
        self.graph = graph
        self.mesh = mesh
        self.buffers: list[Buffer] = []
        self.instructions: list[Instruction] = []
        self.inputs = tuple(
            self.buffer(value, placement) for value, placement in zip(graph.inputs, inputs, strict=True)
        )

    def buffer(self, value: int, placement: Placement) -> int:
        self.buffers.append(Buffer(value, placement))
        return len(self.buffers) - 1

    def compute(
        self, operator: int, inputs: Sequence[int], outputs: Sequence[Placement], recompute: bool = False
    ) -> list[int]:
        placements = iter(outputs)
        made = [
            None if value is None else self.buffer(value, next(placements))
            for value in self.graph.operators[operator].outputs
        ]
        self.instructions.append(Compute(operator, tuple(inputs), tuple(made), recompute))
        return [index for index in made if index is not None]

    def reshard(self, source: int, *path: Placement) -> int:
        target = self.buffer(self.buffers[source].value, path[-1])
        self.instructions.append(Reshard(source, target, (self.buffers[source].placement, *path)))
        return target

    def offload(self, source: int) -> int:
        self.instructions.append(Offload(source, self.buffer(*self._like(source))))
        return len(self.buffers) - 1

    def prefetch(self, source: int) -> int:
        self.instructions.append(Prefetch(source, self.buffer(*self._like(source))))
        return len(self.buffers) - 1

    def _like(self, buffer: int) -> tuple[int, Placement]:
        return self.buffers[buffer].value, self.buffers[buffer].placement

    def update(self, parameter: int, gradient: int) -> None:
        self.instructions.append(Update(parameter, gradient))

    def free(self, *buffers: int) -> None:
        self.instructions.append(Free(buffers))

    def schedule(self, results: Sequence[int]) -> Schedule:
        return Schedule(self.mesh, tuple(self.buffers), self.inputs, tuple(self.instructions), tuple(results))


FLOAT, BOOL = "float32", "bool"


def two_layer_graph() -> OperatorGraph:
    """Step of ``y = relu(dropout(x w1^T)) w2^T`` with a running statistic, a dead operator and views.

    Values: 0 w1 (8,4), 1 w2 (2,8), 2 running (), 3 x (16,4), 4 tangent (), then per operator below.
    """
    make = GraphMaker()
    w1, w2 = make.parameter("w1", (8, 4)), make.parameter("w2", (2, 8))
    running = make.input("running", ValueRole.BUFFER, ())
    x = make.input("x", ValueRole.INPUT, (16, 4))
    tangent = make.input("tangent", ValueRole.TANGENT, ())
    backward = Phase.BACKWARD
    (w1_t,) = make.operator("t", [w1], [((4, 8), FLOAT)], view=True)  # operator 0, value 5
    (hidden,) = make.operator("mm", [x, w1_t], [((16, 8), FLOAT)])  # 1, 6
    dropped, mask = make.operator(  # 2, 7 and 8
        "native_dropout", [hidden], [((16, 8), FLOAT), ((16, 8), BOOL), None], random=True
    )
    (active,) = make.operator("relu", [dropped], [((16, 8), FLOAT)])  # 3, 9
    (w2_t,) = make.operator("t", [w2], [((8, 2), FLOAT)], view=True)  # 4, 10
    (y,) = make.operator("mm", [active, w2_t], [((16, 2), FLOAT)])  # 5, 11
    (loss,) = make.operator("sum", [y], [((), FLOAT)])  # 6, 12
    make.operator("neg", [y], [((16, 2), FLOAT)])  # 7, 13: dead
    (statistic,) = make.operator("add", [running, loss], [((), FLOAT)])  # 8, 14
    (grad_y,) = make.operator("expand", [tangent], [((16, 2), FLOAT)], backward, view=True)  # 9, 15
    (grad_y_t,) = make.operator("t", [grad_y], [((2, 16), FLOAT)], backward, view=True)  # 10, 16
    (grad_w2,) = make.operator("mm", [grad_y_t, active], [((2, 8), FLOAT)], backward)  # 11, 17
    (grad_active,) = make.operator("mm", [grad_y, w2], [((16, 8), FLOAT)], backward)  # 12, 18
    (grad_hidden,) = make.operator("mul", [grad_active, mask], [((16, 8), FLOAT)], backward)  # 13, 19
    (grad_hidden_t,) = make.operator("t", [grad_hidden], [((8, 16), FLOAT)], backward, view=True)  # 14, 20
    (grad_w1,) = make.operator("mm", [grad_hidden_t, x], [((8, 4), FLOAT)], backward)  # 15, 21
    make.output(OutputRole.LOSS, loss)
    make.output(OutputRole.GRADIENT, grad_w1, w1)
    make.output(OutputRole.GRADIENT, grad_w2, w2)
    make.output(OutputRole.BUFFER_UPDATE, statistic, running)
    return make.graph()


def two_layer_schedule(graph: OperatorGraph) -> Schedule:
    """Data parallel on two ranks: w1 sharded and gathered, w2 replicated, ``active`` recomputed."""
    whole, rows, columns, pending = ("R",), ("S0",), ("S1",), ("Psum",)
    make = ScheduleMaker(graph, (2,), [rows, whole, whole, rows, whole])
    w1, w2, running, x, tangent = make.inputs
    gathered = make.reshard(w1, whole)  # instruction 0
    (w1_t,) = make.compute(0, [gathered], [whole])
    (hidden,) = make.compute(1, [x, w1_t], [rows])
    make.free(gathered, w1_t)
    dropped, mask = make.compute(2, [hidden], [rows, rows])
    make.free(hidden)
    (active,) = make.compute(3, [dropped], [rows])
    (w2_t,) = make.compute(4, [w2], [whole])
    (y,) = make.compute(5, [active, w2_t], [rows])
    make.free(active, w2_t)
    (part,) = make.compute(6, [y], [pending])  # instruction 10
    (dead,) = make.compute(7, [y], [rows])
    make.free(y, dead)
    loss = make.reshard(part, whole)
    make.free(part)
    (statistic,) = make.compute(8, [running, loss], [whole])
    (grad_y,) = make.compute(9, [tangent], [rows])
    (grad_y_t,) = make.compute(10, [grad_y], [columns])
    (again,) = make.compute(3, [dropped], [rows], recompute=True)
    make.free(dropped)
    (grad_w2_part,) = make.compute(11, [grad_y_t, again], [pending])  # instruction 20
    make.free(grad_y_t, again)
    grad_w2 = make.reshard(grad_w2_part, whole)
    make.free(grad_w2_part)
    (grad_active,) = make.compute(12, [grad_y, w2], [rows])
    make.free(grad_y)
    make.update(w2, grad_w2)
    make.free(grad_w2)
    (grad_hidden,) = make.compute(13, [grad_active, mask], [rows])
    make.free(grad_active, mask)
    (grad_hidden_t,) = make.compute(14, [grad_hidden], [columns])  # instruction 30
    make.free(grad_hidden)
    (grad_w1_part,) = make.compute(15, [grad_hidden_t, x], [pending])
    make.free(grad_hidden_t)
    grad_w1 = make.reshard(grad_w1_part, rows)
    make.free(grad_w1_part)
    make.update(w1, grad_w1)
    make.free(grad_w1)
    return make.schedule([loss, grad_w1, grad_w2, statistic])


def offload_graph() -> OperatorGraph:
    """Step of ``sum(tanh(x w))`` with operators between: activations of 256 and 512 bytes that backward needs.

    Values: 0 w (4,4), 1 x (16,4), 2 tangent (), then per operator below.
    """
    make, backward = GraphMaker(), Phase.BACKWARD
    w, x = make.parameter("w", (4, 4)), make.input("x", ValueRole.INPUT, (16, 4))
    tangent = make.input("tangent", ValueRole.TANGENT, ())
    (hidden,) = make.operator("mm", [x, w], [((16, 4), FLOAT)])  # operator 0, value 3
    (flat,) = make.operator("view", [hidden], [((64,), FLOAT)], view=True)  # 1, 4
    (active,) = make.operator("tanh", [flat], [((64,), FLOAT)])  # 2, 5
    (wide,) = make.operator("cat", [active, active], [((128,), FLOAT)])  # 3, 6
    (square,) = make.operator("pow", [wide], [((128,), FLOAT)])  # 4, 7
    (loss,) = make.operator("sum", [square], [((), FLOAT)])  # 5, 8
    (grad_wide,) = make.operator("mul", [tangent, wide], [((128,), FLOAT)], backward)  # 6, 9
    (grad_active,) = make.operator("fold", [grad_wide], [((64,), FLOAT)], backward)  # 7, 10
    (flat_again,) = make.operator("view", [hidden], [((64,), FLOAT)], backward, view=True)  # 8, 11
    (grad_flat,) = make.operator("tanh_backward", [grad_active, flat_again], [((64,), FLOAT)], backward)  # 9, 12
    (grad_hidden,) = make.operator("view", [grad_flat], [((16, 4), FLOAT)], backward, view=True)  # 10, 13
    (grad_w,) = make.operator("mm", [x, grad_hidden], [((4, 4), FLOAT)], backward)  # 11, 14
    make.output(OutputRole.LOSS, loss)
    make.output(OutputRole.GRADIENT, grad_w, w)
    return make.graph()


def offload_schedule(graph: OperatorGraph) -> Schedule:
    """On one device: ``hidden`` (256 bytes) and ``wide`` (512 bytes) wait for backward on the host."""
    whole = ("R",)
    make = ScheduleMaker(graph, (1,), [whole, whole, whole])
    w, x, tangent = make.inputs
    (hidden,) = make.compute(0, [x, w], [whole])  # instruction 0
    (flat,) = make.compute(1, [hidden], [whole])
    (active,) = make.compute(2, [flat], [whole])
    make.free(flat)
    hidden_away = make.offload(hidden)
    (wide,) = make.compute(3, [active, active], [whole])
    make.free(active)
    make.free(hidden)
    (square,) = make.compute(4, [wide], [whole])
    wide_away = make.offload(wide)
    (loss,) = make.compute(5, [square], [whole])  # instruction 10
    make.free(square)
    make.free(wide)
    wide_back = make.prefetch(wide_away)
    hidden_back = make.prefetch(hidden_away)
    (grad_wide,) = make.compute(6, [tangent, wide_back], [whole])
    make.free(wide_back, wide_away)
    (grad_active,) = make.compute(7, [grad_wide], [whole])
    make.free(grad_wide)
    (flat_again,) = make.compute(8, [hidden_back], [whole])
    make.free(hidden_away)  # instruction 20
    (grad_flat,) = make.compute(9, [grad_active, flat_again], [whole])
    make.free(hidden_back, flat_again, grad_active)
    (grad_hidden,) = make.compute(10, [grad_flat], [whole])
    (grad_w,) = make.compute(11, [x, grad_hidden], [whole])
    make.free(grad_flat, grad_hidden)
    make.update(w, grad_w)
    make.free(grad_w)
    return make.schedule([loss, grad_w])


def used_strategies(graph: OperatorGraph, schedule: Schedule) -> dict[int, set[tuple[tuple, tuple]]]:
    """Per operator the strategies that a schedule uses: a stand-in for verified rules."""
    table: dict[int, set[tuple[tuple, tuple]]] = {operator.index: set() for operator in graph.operators}
    for instruction in schedule.instructions:
        if isinstance(instruction, Compute):
            outputs = tuple(None if b is None else schedule.buffers[b].placement for b in instruction.outputs)
            inputs = tuple(schedule.buffers[b].placement for b in instruction.inputs)
            table[instruction.operator].add((outputs, inputs))
    return table
