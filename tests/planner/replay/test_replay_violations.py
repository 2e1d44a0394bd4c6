"""One corruption of a correct schedule per kind of violation, and what each is called."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.steps.hand_graphs import FLOAT, GraphMaker, ScheduleMaker
from support.steps.replay_case import ADAMW, GRAPH, SCHEDULE, SGD, check, moved, with_instruction

from planner.graph.operator_graph import OutputRole, Phase, ValueRole
from planner.replay.checker import ViolationKind, replay
from planner.schedule.instructions import Buffer, Compute, Free, Reshard, Schedule, Update


def where(wanted, **fields):
    """Index of the first instruction of a kind with these fields."""
    return next(
        at
        for at, found in enumerate(SCHEDULE.instructions)
        if isinstance(found, wanted) and all(getattr(found, name) == value for name, value in fields.items())
    )


def dropping(at, buffer):
    """The schedule with one buffer taken out of a Free."""
    kept = tuple(b for b in SCHEDULE.instructions[at].buffers if b != buffer)
    return with_instruction(at, Free(kept))


def freeing_with(at, buffer):
    return with_instruction(at, Free((*SCHEDULE.instructions[at].buffers, buffer)))


def at_compute(operator, recompute=False):
    return where(Compute, operator=operator, recompute=recompute)


def output_of(operator, position=0):
    return SCHEDULE.instructions[at_compute(operator)].outputs[position]


def without(at, *buffers):
    """The schedule without an instruction; ``buffers`` are no longer freed either."""
    changed = [
        Free(tuple(b for b in i.buffers if b not in buffers)) if isinstance(i, Free) else i
        for i in SCHEDULE.instructions
    ]
    del changed[at]
    return replace(SCHEDULE, instructions=tuple(changed))


def with_path(at, *path):
    return with_instruction(at, replace(SCHEDULE.instructions[at], path=tuple(path)))


def with_buffer(index, buffer):
    changed = list(SCHEDULE.buffers)
    changed[index] = buffer
    return replace(SCHEDULE, buffers=tuple(changed))


W1, W2, RUNNING, X, TANGENT = SCHEDULE.inputs
LOSS, GRADIENT_1, GRADIENT_2, STATISTIC = SCHEDULE.results
RECOMPUTE = at_compute(3, recompute=True)
GATHER = where(Reshard, source=W1)
UPDATE_1, UPDATE_2 = where(Update, parameter=W1), where(Update, parameter=W2)
LAST_FREE = len(SCHEDULE.instructions) - 1
K = ViolationKind

SINGLE = {
    "mesh of other size": (lambda: replace(SCHEDULE, mesh=(4,)), {K.MESH}),
    "mesh without ranks": (lambda: replace(SCHEDULE, mesh=(0,)), {K.MESH}),
    "unknown operator": (lambda: with_instruction(2, Compute(99, (), ())), {K.INVALID_INDEX}),
    "negative operator": (lambda: with_instruction(2, Compute(-1, (), ())), {K.INVALID_INDEX}),
    "unknown buffer": (lambda: with_instruction(3, Free((999,))), {K.INVALID_INDEX}),
    "unknown input": (lambda: replace(SCHEDULE, inputs=(*SCHEDULE.inputs[:-1], -1)), {K.INVALID_INDEX}),
    "unknown value": (lambda: with_buffer(LOSS, Buffer(999, ("R",))), {K.INVALID_INDEX}),
    "word that is none": (lambda: with_buffer(LOSS, Buffer(12, ("Q",))), {K.INVALID_PLACEMENT}),
    "empty word on a path": (lambda: with_path(GATHER, ("",), ("R",)), {K.INVALID_PLACEMENT}),
    "dimension that is none": (lambda: with_buffer(LOSS, Buffer(12, ("S0",))), {K.INVALID_PLACEMENT}),
    "too many words": (lambda: with_buffer(LOSS, Buffer(12, ("R", "R"))), {K.INVALID_PLACEMENT}),
    "path of too many words": (lambda: with_path(GATHER, ("S0", "R"), ("R", "R")), {K.INVALID_PLACEMENT}),
    "missing input": (lambda: replace(SCHEDULE, inputs=SCHEDULE.inputs[:-1]), {K.ARITY}),
    "missing result": (lambda: replace(SCHEDULE, results=SCHEDULE.results[:-1]), {K.ARITY}),
    "missing argument": (lambda: with_instruction(2, replace(SCHEDULE.instructions[2], inputs=(X,))), {K.ARITY}),
    "missing output": (lambda: with_instruction(2, replace(SCHEDULE.instructions[2], outputs=(None,))), {K.ARITY}),
    "arguments swapped": (
        lambda: with_instruction(24, replace(SCHEDULE.instructions[24], inputs=SCHEDULE.instructions[24].inputs[::-1])),
        {K.WRONG_VALUE, K.STRATEGY},
    ),
    "result of another value": (
        lambda: replace(SCHEDULE, results=(STATISTIC, GRADIENT_1, GRADIENT_2, STATISTIC)),
        {K.WRONG_VALUE, K.NEVER_FREED},
    ),
    "read too early": (lambda: moved(GATHER, 1), {K.USED_BEFORE_CREATED}),
    "read after free": (lambda: moved(3, 2), {K.USED_AFTER_FREE}),
    "step input freed too early": (lambda: freeing_with(3, X), {K.USED_AFTER_FREE}),
    "created twice": (
        lambda: with_instruction(RECOMPUTE, replace(SCHEDULE.instructions[RECOMPUTE], outputs=(output_of(3),))),
        {K.CREATED_TWICE, K.NEVER_CREATED, K.USED_BEFORE_CREATED, K.FREED_BEFORE_CREATED},
    ),
    "never created": (
        lambda: replace(SCHEDULE, buffers=(*SCHEDULE.buffers, Buffer(12, ("R",)))),
        {K.NEVER_CREATED},
    ),
    "freed twice": (lambda: freeing_with(LAST_FREE, output_of(1)), {K.FREED_TWICE}),
    "freed before created": (
        lambda: freeing_with(3, output_of(12)),
        {K.FREED_BEFORE_CREATED},
    ),
    "parameter freed": (lambda: freeing_with(LAST_FREE, W1), {K.FREED_PARAMETER}),
    "module buffer freed": (lambda: freeing_with(LAST_FREE, RUNNING), {K.FREED_PARAMETER}),
    "loss freed": (lambda: freeing_with(LAST_FREE, LOSS), {K.FREED_RESULT}),
    "leak": (lambda: dropping(3, W1 + 5), {K.NEVER_FREED}),
    "gradient leaks": (lambda: dropping(LAST_FREE, GRADIENT_1), {K.NEVER_FREED}),
    "executed twice": (
        lambda: with_instruction(RECOMPUTE, replace(SCHEDULE.instructions[RECOMPUTE], recompute=False)),
        {K.EXECUTED_TWICE},
    ),
    "first execution called a recomputation": (
        lambda: with_instruction(at_compute(5), replace(SCHEDULE.instructions[at_compute(5)], recompute=True)),
        {K.RECOMPUTED_BEFORE_EXECUTED},
    ),
    "view called a recomputation": (
        lambda: with_instruction(1, replace(SCHEDULE.instructions[1], recompute=True)),
        {K.RECOMPUTED_VIEW},
    ),
    "out of order": (lambda: moved(at_compute(13), at_compute(11)), {K.OUT_OF_ORDER, K.USED_BEFORE_CREATED}),
    "no such rule": (
        lambda: with_buffer(output_of(14), Buffer(20, ("S0",))),
        {K.STRATEGY},
    ),
    "path from elsewhere": (lambda: with_path(GATHER, ("S1",), ("R",)), {K.RESHARD_PATH}),
    "path to elsewhere": (lambda: with_path(GATHER, ("S0",), ("S1",)), {K.RESHARD_PATH}),
    "path without steps": (lambda: with_path(GATHER), {K.RESHARD_PATH}),
    "step that stands still": (lambda: with_path(GATHER, ("S0",), ("S0",), ("R",)), {K.RESHARD_PATH}),
    "step to a reduction": (lambda: with_path(GATHER, ("S0",), ("Psum",), ("R",)), {K.RESHARD_PATH}),
    "step that does not divide": (lambda: with_path(GATHER, ("S0",), ("S2",), ("R",)), {K.RESHARD_PATH}),
    "reshard of another value": (
        lambda: with_instruction(GATHER, Reshard(X, SCHEDULE.instructions[GATHER].target, (("S0",), ("R",)))),
        {K.WRONG_VALUE},
    ),
    "update of no parameter": (
        lambda: with_instruction(UPDATE_1, Update(X, GRADIENT_1)),
        {K.UPDATE_PARAMETER, K.NEVER_UPDATED},
    ),
    "update with another gradient": (
        lambda: with_instruction(UPDATE_2, Update(W2, output_of(12))),
        {K.UPDATE_GRADIENT},
    ),
    "update after its gradient is freed": (
        lambda: moved(UPDATE_1, UPDATE_1 + 1),
        {K.USED_AFTER_FREE},
    ),
    "updated twice": (
        lambda: replace(
            SCHEDULE, instructions=(*SCHEDULE.instructions[: UPDATE_2 + 1], *SCHEDULE.instructions[UPDATE_2:])
        ),
        {K.UPDATED_TWICE},
    ),
    "never updated": (lambda: without(UPDATE_2), {K.NEVER_UPDATED}),
    "parameter read after its update": (
        lambda: moved(at_compute(12), UPDATE_2 + 1),
        {K.READ_AFTER_UPDATE, K.USED_AFTER_FREE},
    ),
    "loss not reduced": (
        lambda: replace(SCHEDULE, results=(output_of(6), *SCHEDULE.results[1:])),
        {K.RESULT_PLACEMENT, K.FREED_RESULT, K.NEVER_FREED},
    ),
    "gradient elsewhere": (
        lambda: with_buffer(W2, Buffer(1, ("S0",))),
        {K.RESULT_PLACEMENT, K.STRATEGY},
    ),
}


@pytest.mark.parametrize("name", SINGLE)
def test_each_violation_is_named(name):
    corrupt, expected = SINGLE[name]
    report = check(corrupt(), devices=2)
    assert report.kinds == expected, "\n".join(map(str, report.violations))
    assert not report.ok
    for violation in report.violations:
        assert violation.message
        assert "\n" not in str(violation)


def test_messages_name_operators_and_buffers():
    report = check(moved(3, 2))
    assert str(report.violations[0]) == (
        "instruction 3: used_after_free: compute of net/forward/aten.mm/1 reads "
        "buffer 6 (net/forward/aten.t/0#0 as [R]), freed by instruction 2"
    )


def test_limit_is_a_violation_at_the_peak():
    report = check(SCHEDULE, limit=1159)
    assert report.kinds == {K.OVER_LIMIT}
    assert report.violations[0].instruction == 8
    assert "1160 bytes at compute of net/forward/aten.mm/5, 1 more than the limit of 1159" in str(report.violations[0])


def test_step_that_needs_too_much_before_it_begins():
    assert replay(GRAPH, replace(SCHEDULE, instructions=()), optimizer=ADAMW, limit=100).peak_instruction == -1


def test_random_operator_may_run_again_only_with_counter_based_numbers():
    dropout = SCHEDULE.instructions[at_compute(2)]
    count = len(SCHEDULE.buffers)
    buffers = (*SCHEDULE.buffers, SCHEDULE.buffers[dropout.outputs[0]], SCHEDULE.buffers[dropout.outputs[1]])
    again = replace(dropout, outputs=(count, count + 1, None), recompute=True)
    head, tail = SCHEDULE.instructions[:5], SCHEDULE.instructions[5:]
    schedule = replace(SCHEDULE, buffers=buffers, instructions=(*head, again, Free((count, count + 1)), *tail))
    assert check(schedule).kinds == {K.RECOMPUTED_RANDOM}
    assert check(schedule, counter_based_random=True).ok


def test_needed_operator_that_never_runs_is_missed():
    # Without its gradient, w2's operators 11 and 12 still matter: 12 for w1, 11 for the result.
    at = at_compute(11)
    report = check(without(at))
    assert K.NEVER_EXECUTED in report.kinds
    assert any("net/backward/aten.mm/11 never runs" in str(violation) for violation in report.violations)


def test_dead_operator_may_be_left_out():
    at = at_compute(7)
    dead = output_of(7)
    schedule = without(at, dead)
    renumbered = _without_buffer(schedule, dead)
    assert check(renumbered).ok


def _without_buffer(schedule, index):
    def move(buffer):
        return buffer if buffer is None or buffer < index else buffer - 1

    def change(instruction):
        match instruction:
            case Compute(operator, inputs, outputs, again):
                return Compute(operator, tuple(map(move, inputs)), tuple(map(move, outputs)), again)
            case Reshard(source, target, path):
                return Reshard(move(source), move(target), path)
            case Update(parameter, gradient):
                return Update(move(parameter), move(gradient))
            case Free(buffers):
                return Free(tuple(map(move, buffers)))

    buffers = schedule.buffers[:index] + schedule.buffers[index + 1 :]
    instructions = tuple(map(change, schedule.instructions))
    return Schedule(schedule.mesh, buffers, schedule.inputs, instructions, tuple(map(move, schedule.results)))


def test_module_buffer_that_is_updated_must_be_whole():
    make = GraphMaker()
    running = make.input("running", ValueRole.BUFFER, (4,))
    (new,) = make.operator("neg", [running], [((4,), FLOAT)])
    make.output(OutputRole.BUFFER_UPDATE, new, running)
    graph = make.graph()
    steps = ScheduleMaker(graph, (2,), [("S0",)])
    (result,) = steps.compute(0, [steps.inputs[0]], [("R",)])
    report = replay(graph, steps.schedule([result]), optimizer=SGD)
    assert report.kinds == {K.RESULT_PLACEMENT}
    assert "module buffer running is updated" in str(report.violations[0])


def test_input_cannot_be_a_pending_reduction():
    make = GraphMaker()
    x = make.input("x", ValueRole.INPUT, (4,))
    (new,) = make.operator("neg", [x], [((4,), FLOAT)])
    make.output(OutputRole.LOSS, new)
    graph = make.graph()
    steps = ScheduleMaker(graph, (2,), [("Psum",)])
    (result,) = steps.compute(0, [steps.inputs[0]], [("R",)])
    assert replay(graph, steps.schedule([result]), optimizer=SGD).kinds == {K.INVALID_PLACEMENT}


def test_parameter_seen_through_a_view_after_its_update():
    make = GraphMaker()
    w = make.parameter("w", (4,))
    (seen,) = make.operator("view", [w], [((4,), FLOAT)], view=True)
    (gradient,) = make.operator("neg", [w], [((4,), FLOAT)], Phase.BACKWARD)
    (loss,) = make.operator("sum", [seen], [((), FLOAT)], Phase.BACKWARD)
    make.output(OutputRole.GRADIENT, gradient, w)
    make.output(OutputRole.LOSS, loss)
    graph = make.graph()
    steps = ScheduleMaker(graph, (2,), [("R",)])
    (view,) = steps.compute(0, [steps.inputs[0]], [("R",)])
    (grad,) = steps.compute(1, [steps.inputs[0]], [("R",)])
    steps.update(steps.inputs[0], grad)
    steps.free(grad)
    (result,) = steps.compute(2, [view], [("R",)])
    steps.free(view)
    report = replay(graph, steps.schedule([grad, result]), optimizer=SGD)
    assert report.kinds == {K.READ_AFTER_UPDATE}
    assert report.violations[0].instruction == 4
