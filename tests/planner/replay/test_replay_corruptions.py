"""Every index, flag and word of a correct schedule changed in turn: the replay catches all of it."""

from __future__ import annotations

from dataclasses import replace

from support.steps.replay_case import GRAPH, SCHEDULE, check, moved

from planner.schedule.instructions import Compute, Free, Reshard, Update


def field_corruptions(schedule):
    """Every index, flag and word of a schedule replaced by every other one, one at a time."""
    count = len(schedule.buffers)

    def others(buffer):
        return (other for other in (*range(-1, count + 1), None) if other != buffer)

    def put(at, instruction):
        changed = list(schedule.instructions)
        changed[at] = instruction
        return replace(schedule, instructions=tuple(changed))

    def each(at, instruction, name):
        values = getattr(instruction, name)
        for position, old in enumerate(values):
            for new in others(old):
                if new is None and name != "outputs":
                    continue
                changed = (*values[:position], new, *values[position + 1 :])
                yield put(at, replace(instruction, **{name: changed}))

    for at, instruction in enumerate(schedule.instructions):
        match instruction:
            case Compute():
                yield from each(at, instruction, "inputs")
                yield from each(at, instruction, "outputs")
                yield put(at, replace(instruction, recompute=not instruction.recompute))
                for other in range(-1, len(GRAPH.operators) + 1):
                    if other != instruction.operator:
                        yield put(at, replace(instruction, operator=other))
            case Reshard(source, target, path):
                yield from (put(at, replace(instruction, source=new)) for new in others(source) if new is not None)
                yield from (put(at, replace(instruction, target=new)) for new in others(target) if new is not None)
                for position, old in enumerate(path):
                    for word in ("R", "S0", "S1", "S2", "Psum", "Pmax", "x"):
                        if (word,) != old:
                            changed = (*path[:position], (word,), *path[position + 1 :])
                            yield put(at, replace(instruction, path=changed))
                    yield put(at, replace(instruction, path=path[:position] + path[position + 1 :]))
                    yield put(at, replace(instruction, path=(*path[:position], old, *path[position:])))
            case Update(parameter, gradient):
                yield from (put(at, Update(new, gradient)) for new in others(parameter) if new is not None)
                yield from (put(at, Update(parameter, new)) for new in others(gradient) if new is not None)
            case Free(buffers):
                yield from each(at, instruction, "buffers")
                for position in range(len(buffers)):
                    yield put(at, Free(buffers[:position] + buffers[position + 1 :]))
                yield put(at, Free((*buffers, buffers[0])))
        changed = list(schedule.instructions)
        yield replace(schedule, instructions=(*changed[:at], *changed[at + 1 :]))
        yield replace(schedule, instructions=(*changed[:at], changed[at], *changed[at:]))
    for name in ("inputs", "results"):
        values = getattr(schedule, name)
        for position, old in enumerate(values):
            for new in others(old):
                if new is not None:
                    yield replace(schedule, **{name: (*values[:position], new, *values[position + 1 :])})
    for index, buffer in enumerate(schedule.buffers):
        for value in range(-1, len(GRAPH.values) + 1):
            if value != buffer.value:
                yield _replace_buffer(schedule, index, replace(buffer, value=value))
        for word in ("R", "S0", "S1", "Psum", "Pmax", ""):
            if (word,) != buffer.placement:
                yield _replace_buffer(schedule, index, replace(buffer, placement=(word,)))


def _replace_buffer(schedule, index, buffer):
    return replace(schedule, buffers=(*schedule.buffers[:index], buffer, *schedule.buffers[index + 1 :]))


def read_buffers(instruction):
    match instruction:
        case Compute(_, inputs):
            return set(inputs)
        case Reshard(source):
            return {source}
        case Update(parameter, gradient):
            return {parameter, gradient}
    return set()


def made_buffers(instruction):
    match instruction:
        case Compute(_, _, outputs):
            return {buffer for buffer in outputs if buffer is not None}
        case Reshard(_, target):
            return {target}
        case Free(buffers):
            return set(buffers)
        case Update(parameter):
            return {parameter}
    return set()


def test_every_corruption_of_every_field_is_caught():
    corruptions = list(field_corruptions(SCHEDULE))
    assert len(corruptions) > 3500
    assert [corrupted for corrupted in corruptions if check(corrupted, devices=2).ok] == []


def test_neighbours_may_change_places_only_when_independent():
    for at in range(len(SCHEDULE.instructions) - 1):
        first, second = SCHEDULE.instructions[at : at + 2]
        dependent = (made_buffers(first) & (read_buffers(second) | made_buffers(second))) or (
            made_buffers(second) & read_buffers(first)
        )
        ordered = all(
            isinstance(i, Compute) and not i.recompute and not GRAPH.operators[i.operator].is_view
            for i in (first, second)
        )
        assert check(moved(at, at + 1)).ok == (not dependent and not ordered), (first, second)
