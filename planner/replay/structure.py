"""Checks of each instruction by itself: indices, values, placements, paths, strategies."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import pairwise
from math import prod

from planner.common.root_name import shown
from planner.graph.operator_graph import Operator, OperatorGraph, OutputRole, ValueRole
from planner.graph.placement import Placement, divides, is_partial, is_shard, replicated
from planner.replay.report import Violation, ViolationKind
from planner.replay.wording import Wording, placement_text
from planner.schedule.instructions import Compute, Free, Instruction, Offload, Prefetch, Reshard, Schedule, Update, Wait

Strategy = tuple[tuple[Placement | None, ...], tuple[Placement, ...]]
"""Placements of an operator's outputs (None where it returns none) and of its inputs."""

StrategyTable = Callable[[int], Collection[Strategy]]
"""Verified strategies of an operator, by its index."""

_AXIS_PLACEMENT = re.compile(r"R|S(?:0|[1-9][0-9]*)|P(?:sum|avg|max|min)")
_LINEAR = frozenset({"Psum", "Pavg"})


def shape_violations(graph: OperatorGraph, schedule: Schedule, devices: int | None) -> Iterator[Violation]:
    """Violations that rule out further checks: mesh, indices, counts, unlawful and unknown placements."""
    mesh, names = schedule.mesh, Wording(graph, schedule)
    if not mesh or any(size < 1 for size in mesh):
        yield Violation(ViolationKind.MESH, None, f"mesh {mesh} needs one positive size per axis")
        return
    if devices is not None and prod(mesh) != devices:
        yield Violation(ViolationKind.MESH, None, f"mesh {mesh} has {prod(mesh)} ranks, the job has {devices}")
    known: set[tuple[int, Placement]] = set()
    for index, buffer in enumerate(schedule.buffers):
        if not 0 <= buffer.value < len(graph.values):
            message = f"buffer {index} is of value {buffer.value}, the graph has {len(graph.values)}"
            yield Violation(ViolationKind.INVALID_INDEX, None, message)
        elif (buffer.value, buffer.placement) not in known:
            known.add((buffer.value, buffer.placement))
            problem = unlawful(graph.values[buffer.value].spec.shape, buffer.placement, mesh)
            if problem:
                message = f"{names.buffer(index)}: {problem}"
                yield Violation(ViolationKind.INVALID_PLACEMENT, None, message)
    for name, found, wanted in (
        ("inputs", schedule.inputs, len(graph.inputs)),
        ("results", schedule.results, len(graph.outputs)),
    ):
        if len(found) != wanted:
            message = f"{len(found)} {name} where the graph has {wanted}"
            yield Violation(ViolationKind.ARITY, None, message)
        if any(not 0 <= buffer < len(schedule.buffers) for buffer in found):
            yield Violation(ViolationKind.INVALID_INDEX, None, f"{name} name a buffer that is not in the schedule")
    for at, instruction in enumerate(schedule.instructions):
        for kind, message in _instruction_shape(graph, schedule, instruction):
            yield Violation(kind, at, message)


def _instruction_shape(
    graph: OperatorGraph, schedule: Schedule, instruction: Instruction
) -> Iterator[tuple[ViolationKind, str]]:
    used: tuple[int, ...] = ()
    match instruction:
        case Compute(index, inputs, outputs):
            if not 0 <= index < len(graph.operators):
                yield ViolationKind.INVALID_INDEX, f"operator {index}: the graph has {len(graph.operators)}"
                return
            operator = graph.operators[index]
            used = (*inputs, *(buffer for buffer in outputs if buffer is not None))
            if len(inputs) != len(operator.inputs):
                message = f"{shown(operator.identity)} takes {len(operator.inputs)} tensors, gets {len(inputs)}"
                yield ViolationKind.ARITY, message
            if not _creates_what_it_returns(operator, outputs):
                wanted = sum(value is not None for value in operator.outputs)
                places = f"{wanted} tensors in {len(operator.outputs)} places"
                message = f"{shown(operator.identity)} returns {places}, not {outputs}"
                yield ViolationKind.ARITY, message
        case Reshard(source, target, path):
            used = (source, target)
            for placement in path:
                problem = _malformed(placement, schedule.mesh)
                if problem:
                    yield ViolationKind.INVALID_PLACEMENT, f"{placement_text(placement)} on the path: {problem}"
        case Update(parameter, gradient):
            used = (parameter, gradient)
        case Free(buffers):
            used = buffers
        case Wait(buffer):
            used = (buffer,)
        case Offload(source, target) | Prefetch(source, target):
            used = (source, target)
    for buffer in used:
        if not 0 <= buffer < len(schedule.buffers):
            message = f"buffer {buffer} is not in the schedule, which has {len(schedule.buffers)}"
            yield ViolationKind.INVALID_INDEX, message


def meaning_violations(graph: OperatorGraph, schedule: Schedule, allowed: StrategyTable | None) -> Iterator[Violation]:
    """Wrong values, strategies that no rule allows, illegal paths, misplaced inputs and results."""
    names, buffers = Wording(graph, schedule), schedule.buffers
    strategies: dict[int, Collection[Strategy]] = {}
    yield from _boundary(graph, schedule, names)
    for at, instruction in enumerate(schedule.instructions):
        match instruction:
            case Compute(index, inputs, outputs):
                operator = graph.operators[index]
                made = ((b, v) for b, v in zip(outputs, operator.outputs, strict=True) if b is not None)
                for buffer, value in (*zip(inputs, operator.inputs, strict=True), *made):
                    if value is not None and buffers[buffer].value != value:
                        message = (
                            f"{names.instruction(instruction)} has {names.buffer(buffer)} for {names.value(value)}"
                        )
                        yield Violation(ViolationKind.WRONG_VALUE, at, message)
                if allowed is not None:
                    if index not in strategies:
                        strategies[index] = allowed(index)
                    strategy = strategy_of(schedule, instruction)
                    if not any(_matches(strategy, known) for known in strategies[index]):
                        message = f"{shown(operator.identity)} has no rule for {_strategy_text(strategy)}"
                        yield Violation(ViolationKind.STRATEGY, at, message)
            case Reshard(source, target, path, overlapped):
                if buffers[source].value != buffers[target].value:
                    message = f"{names.buffer(source)} is made {names.buffer(target)}, another value"
                    yield Violation(ViolationKind.WRONG_VALUE, at, message)
                shape = graph.values[buffers[source].value].spec.shape
                ends = buffers[source].placement, buffers[target].placement
                problem = path_problem(shape, ends, path, schedule.mesh)
                if overlapped and not problem and (len(path), communicating_steps(path)) != (2, 1):
                    problem = "only a single collective runs beside the computation"
                if problem:
                    yield Violation(ViolationKind.RESHARD_PATH, at, f"{names.instruction(instruction)}: {problem}")
                elif instruction.in_place and not _reduces_in_place(schedule, at):
                    message = f"{names.instruction(instruction)} is no overlapped all-reduce of its own, but in place"
                    yield Violation(ViolationKind.IN_PLACE, at, message)
                elif instruction.joined and not _joins(graph, schedule, at):
                    message = f"{names.instruction(instruction)} joins no collective of its kind, axis and dtype"
                    yield Violation(ViolationKind.BUCKET, at, message)
            case Offload(source, target) | Prefetch(source, target):
                message = f"{names.instruction(instruction)} makes {names.buffer(target)}"
                if buffers[source].value != buffers[target].value:
                    yield Violation(ViolationKind.WRONG_VALUE, at, f"{message}, another value")
                elif buffers[source].placement != buffers[target].placement:
                    yield Violation(ViolationKind.TRANSFER_PLACEMENT, at, f"{message}: a copy keeps the placement")


def _reduces_in_place(schedule: Schedule, at: int) -> bool:
    """Whether a resharding that is sound by itself may be one in place."""
    entry, *behind = schedule.instructions[at : at + 2]
    assert isinstance(entry, Reshard)
    in_bucket = entry.joined or any(isinstance(after, Reshard) and after.joined for after in behind)
    return entry.overlapped and not in_bucket and is_all_reduce(entry.path)


def is_all_reduce(path: Sequence[Placement]) -> bool:
    """Whether a path is a single all-reduce."""
    changed = [(was, becomes) for was, becomes in zip(path[0], path[-1], strict=True) if was != becomes]
    return len(path) == 2 and len(changed) == 1 and is_partial(changed[0][0]) and changed[0][1] == "R"


def _joins(graph: OperatorGraph, schedule: Schedule, at: int) -> bool:
    """Whether a joined resharding, which is sound by itself, may be part of the collective of the one before it."""
    pair = schedule.instructions[max(at - 1, 0) : at + 1]
    parts = [entry for entry in pair if isinstance(entry, Reshard) and entry.overlapped and len(entry.path) == 2]
    if len(parts) != 2:
        return False
    dtypes = {graph.values[schedule.buffers[part.source].value].spec.dtype for part in parts}
    kinds = {
        (axis, "S" if is_shard(old) else old, "S" if is_shard(new) else new)
        for part in parts
        for axis, (old, new) in enumerate(zip(*part.path, strict=True))
        if old != new
    }
    return len(dtypes) == len(kinds) == 1 and all((old, new) != ("S", "S") for _, old, new in kinds)


def _boundary(graph: OperatorGraph, schedule: Schedule, names: Wording) -> Iterator[Violation]:
    buffers, whole = schedule.buffers, replicated(len(schedule.mesh))
    home: dict[int, Placement] = {}
    for value, index in zip(graph.inputs, schedule.inputs, strict=True):
        home[value] = buffers[index].placement
        if buffers[index].value != value:
            message = f"input {names.value(value)} is {names.buffer(index)}"
            yield Violation(ViolationKind.WRONG_VALUE, None, message)
        elif any(is_partial(entry) for entry in buffers[index].placement):
            message = f"input {names.buffer(index)} cannot start as a pending reduction"
            yield Violation(ViolationKind.INVALID_PLACEMENT, None, message)
    for output, index in zip(graph.outputs, schedule.results, strict=True):
        name = f"{output.role} {names.value(output.value)}"
        if buffers[index].value != output.value:
            yield Violation(ViolationKind.WRONG_VALUE, None, f"result {name} is {names.buffer(index)}")
            continue
        wanted = home[output.of] if output.role is OutputRole.GRADIENT and output.of is not None else whole
        if buffers[index].placement != wanted:
            message = f"result {name} is {names.buffer(index)}, not {placement_text(wanted)}"
            yield Violation(ViolationKind.RESULT_PLACEMENT, None, message)
        updated = output.of is not None and graph.values[output.of].role is ValueRole.BUFFER
        if updated and output.of is not None and home[output.of] != whole:
            message = f"module buffer {names.value(output.of)} is updated, so it must be {placement_text(whole)}"
            yield Violation(ViolationKind.RESULT_PLACEMENT, None, message)


def strategy_of(schedule: Schedule, compute: Compute) -> Strategy:
    """Placements under which an instruction runs its operator."""
    buffers = schedule.buffers
    outputs = tuple(None if index is None else buffers[index].placement for index in compute.outputs)
    return outputs, tuple(buffers[index].placement for index in compute.inputs)


def _creates_what_it_returns(operator: Operator, outputs: tuple[int | None, ...]) -> bool:
    """Whether there is a buffer for every returned tensor; a view may leave out outputs that are not read."""
    if len(outputs) != len(operator.outputs):
        return False
    pairs = list(zip(outputs, operator.outputs, strict=True))
    if any(buffer is not None and value is None for buffer, value in pairs):
        return False
    if operator.is_view:
        return any(buffer is not None for buffer in outputs)
    return all(buffer is not None or value is None for buffer, value in pairs)


def _matches(strategy: Strategy, known: Strategy) -> bool:
    """Whether a known strategy has these placements; outputs that are not created match anything."""
    outputs, inputs = strategy
    known_outputs, known_inputs = known
    return inputs == known_inputs and all(
        mine is None or mine == its for mine, its in zip(outputs, known_outputs, strict=True)
    )


def unlawful(shape: Sequence[int], placement: Placement, mesh: Sequence[int]) -> str:
    """Reason why a tensor of ``shape`` cannot have this placement, or an empty string."""
    problem = _malformed(placement, mesh)
    if problem or divides(shape, placement, mesh):
        return problem
    return f"shape {tuple(shape)} does not divide on mesh {tuple(mesh)}"


def _malformed(placement: Placement, mesh: Sequence[int]) -> str:
    if len(placement) != len(mesh):
        return f"{len(placement)} placements on a mesh of {len(mesh)} axes"
    return next((f"{entry!r} is no placement" for entry in placement if not _AXIS_PLACEMENT.fullmatch(entry)), "")


def communicating_steps(path: Sequence[Placement]) -> int:
    """Steps that are collectives: all but local slices, which turn one ``R`` into a shard."""
    return sum(all(a == b or a != "R" for a, b in zip(old, new, strict=True)) for old, new in pairwise(path))


def communicating_axes(path: Sequence[Placement]) -> list[int]:
    """Mesh axis of every step that is a collective; each step changes one axis."""
    return [
        axis
        for old, new in pairwise(path)
        for axis, (was, becomes) in enumerate(zip(old, new, strict=True))
        if was != becomes and was != "R"
    ]


def path_problem(
    shape: Sequence[int], ends: tuple[Placement, Placement], path: tuple[Placement, ...], mesh: Sequence[int]
) -> str:
    """Reason why a path is no legal sequence of collectives between two placements, or an empty string."""
    if len(path) < 2 or ends[0] == ends[1]:
        return "it goes nowhere"
    if (path[0], path[-1]) != ends:
        return f"its path leads from {placement_text(path[0])} to {placement_text(path[-1])}"
    pending = {entry for entry in path[0] if is_partial(entry)}
    if len(pending) > 1 and not pending <= _LINEAR:
        return f"reductions {', '.join(sorted(pending))} do not commute"
    for old, new in pairwise(path):
        problem = unlawful(shape, new, mesh) or _step_problem(old, new)
        if problem:
            return f"step {placement_text(old)} -> {placement_text(new)}: {problem}"
    return ""


def _step_problem(old: Placement, new: Placement) -> str:
    changed = [axis for axis, (was, becomes) in enumerate(zip(old, new, strict=True)) if was != becomes]
    if len(changed) != 1:
        return f"{len(changed)} mesh axes change"
    axis = changed[0]
    was, becomes = old[axis], new[axis]
    if is_partial(becomes):
        return "nothing becomes a pending reduction"
    if is_partial(was) and is_shard(becomes) and was not in _LINEAR:
        return f"{was} cannot be scattered"
    inner = old[axis + 1 :]
    if any(is_shard(entry) and entry in inner for entry in (was, becomes)):
        return "an inner axis shards the same dimension"
    return ""


def _strategy_text(strategy: Strategy) -> str:
    outputs = " ".join("none" if placement is None else placement_text(placement) for placement in strategy[0])
    return f"{' '.join(map(placement_text, strategy[1]))} -> {outputs}"
