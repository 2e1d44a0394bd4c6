"""The step whose activations wait on the host, its correct schedule, and prices under which every copy matters."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from support.steps.hand_graphs import FLOAT, GraphMaker, ScheduleMaker, offload_graph, offload_schedule, used_strategies
from support.steps.replay_case import SGD

from planner.graph.operator_graph import OutputRole, Phase, ValueRole
from planner.machine.cluster import HostCopies
from planner.replay.checker import replay
from planner.schedule.instructions import Free, Offload, Prefetch, reads

GRAPH = offload_graph()
SCHEDULE = offload_schedule(GRAPH)
RULES = used_strategies(GRAPH, SCHEDULE)


class CopyPrices:
    """Every operator takes 10, an update 1, a copy what ``copies`` says per value."""

    def __init__(self, copies=None, way=HostCopies.BOTH_WAYS):
        self.copies = copies or {}
        self.host_copies = way

    def compute_quanta(self, operator, outputs, inputs):
        return 10

    def reshard_quanta(self, value, path, in_place):
        return 10

    def update_quanta(self, parameter, placement):
        return 1

    def transfer_quanta(self, value, placement, outward):
        return self.copies[value]


def check(schedule, **options):
    return replay(GRAPH, schedule, optimizer=SGD, **{"allowed": RULES.__getitem__, **options})


def with_instruction(at, instruction):
    changed = list(SCHEDULE.instructions)
    changed[at] = instruction
    return replace(SCHEDULE, instructions=tuple(changed))


def inserted(at, instruction):
    found = SCHEDULE.instructions
    return replace(SCHEDULE, instructions=(*found[:at], instruction, *found[at:]))


def without(at):
    found = SCHEDULE.instructions
    return replace(SCHEDULE, instructions=(*found[:at], *found[at + 1 :]))


def moved(at, to):
    changed = list(SCHEDULE.instructions)
    changed.insert(to, changed.pop(at))
    return replace(SCHEDULE, instructions=tuple(changed))


def offload_program(draw):
    """Operators that read random earlier values, which go to the host, come back and are freed at random moments."""
    make = GraphMaker()
    values = [make.input("x", ValueRole.INPUT, (8,))]
    count = draw(st.integers(2, 8))
    for _ in range(count):
        inputs = [values[-1], *draw(st.lists(st.sampled_from(values[1:]), max_size=2))] if values[1:] else values
        values += make.operator("op", inputs, [((draw(st.sampled_from([4, 8, 16])),), FLOAT)])
    make.output(OutputRole.LOSS, values[-1])
    graph = make.graph()
    steps = ScheduleMaker(graph, (1,), [("R",)])
    device: dict[int, int] = {values[0]: steps.inputs[0]}
    host: dict[int, int] = {}

    def fetch(value):
        device[value] = steps.prefetch(host[value])

    def drop(value):
        steps.free(device.pop(value))

    for operator in graph.operators:
        for value in operator.inputs:
            if value not in device:
                fetch(value)
        (device[operator.outputs[0]],) = steps.compute(
            operator.index, [device[value] for value in operator.inputs], [("R",)]
        )
        if operator.index == count - 1:
            break
        if draw(st.booleans()):
            host[operator.outputs[0]] = steps.offload(device[operator.outputs[0]])
        for value in sorted(host):
            choice = draw(st.sampled_from(["leave", "leave", "move"]))
            if choice == "move":
                drop(value) if value in device else fetch(value)
    fetched = {entry.source for entry in steps.instructions if isinstance(entry, Prefetch)}
    for value, buffer in host.items():
        if buffer not in fetched:
            if value in device:
                drop(value)
            fetch(value)
    result = device.pop(values[-1])
    del device[values[0]]
    for buffer in draw(st.permutations([*device.values(), *host.values()])):
        steps.free(buffer)
    return graph, steps.schedule([result])


def ticked_time(schedule, prices):
    """Time of a step whose operators take 10 each, one tick after another; queues per link, nothing computed ahead."""
    instructions, at, busy, now = schedule.instructions, 0, 0, 0
    way, queues = prices.host_copies, {"out": [], "in": []}
    done: set[int] = set()  # positions of finished copies
    remaining: dict[int, int] = {}
    using: dict[int, list[int]] = {}
    filling: dict[int, int] = {}
    issued = -1
    while at < len(instructions) or busy:
        moved_on = True
        while moved_on:
            moved_on = False
            for queue in queues.values():
                if queue:
                    head, source = queue[0]
                    if remaining[head] == 0 and (source not in filling or filling[source] in done):
                        done.add(queue.pop(0)[0])
                        moved_on = True
            if busy or at == len(instructions):
                continue
            entry = instructions[at]
            if isinstance(entry, Free):
                blocked = any(copy not in done for buffer in entry.buffers for copy in using.get(buffer, ()))
            elif isinstance(entry, (Offload, Prefetch)):
                if issued < at:
                    issued = at
                    link = "out" if isinstance(entry, Offload) or way is HostCopies.TAKE_TURNS else "in"
                    queues[link].append((at, entry.source))
                    remaining[at] = prices.copies[schedule.buffers[entry.source].value]
                    for buffer in (entry.source, entry.target):
                        using.setdefault(buffer, []).append(at)
                    filling[entry.target] = at
                    moved_on = True
                blocked = way is HostCopies.BLOCKING and at not in done
            else:
                blocked = any(buffer in filling and filling[buffer] not in done for buffer in reads(entry))
                busy = 0 if blocked else 10
            if not blocked:
                at += 1
                moved_on = True
        if at == len(instructions) and not busy:
            break
        now += 1
        busy = max(0, busy - 1)
        for queue in queues.values():
            if queue:
                head, source = queue[0]
                if source not in filling or filling[source] in done:
                    remaining[head] -= 1
    return now


def training_step(draw):
    """A random forward with views and skips, its loss, and a backward that reads forward values, views among them."""
    make = GraphMaker()
    values = [make.parameter("w", (8,)), make.input("x", ValueRole.INPUT, (8,))]
    tangent = make.input("tangent", ValueRole.TANGENT, (8,))
    for _ in range(draw(st.integers(2, 6))):
        view = len(values) > 2 and draw(st.integers(0, 3)) == 0
        inputs = [values[-1]] if view else [values[-1], *draw(st.lists(st.sampled_from(values), max_size=1))]
        size = 8 if view else draw(st.sampled_from([8, 8, 64]))
        values += make.operator("op", inputs, [((size,), FLOAT)], view=view)
    make.output(OutputRole.LOSS, *make.operator("sum", [values[-1]], [((), FLOAT)]))
    gradient = tangent
    forward = values[2:]
    for _ in range(draw(st.integers(1, 8))):
        read = draw(st.lists(st.sampled_from(forward), max_size=2))
        if read and draw(st.integers(0, 2)) == 0:
            read[:1] = make.operator("view", read[:1], [((8,), FLOAT)], Phase.BACKWARD, view=True)
        (gradient,) = make.operator("op", [gradient, *read], [((8,), FLOAT)], Phase.BACKWARD)
    make.output(OutputRole.GRADIENT, gradient, values[0])
    return make.graph()
