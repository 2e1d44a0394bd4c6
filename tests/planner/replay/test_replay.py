"""The replay's bytes and costs against figures computed by hand and against a naive simulation."""

from __future__ import annotations

import itertools
import sys
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.steps.hand_graphs import FLOAT, GraphMaker, ScheduleMaker
from support.steps.replay_case import ADAMW, GRAPH, SCHEDULE, SGD, Prices, check

from planner.graph.operator_graph import OutputRole, ValueRole
from planner.graph.optimizers import optimizer_named
from planner.graph.placement import divides, local_numel, local_shape
from planner.machine.cluster import LinkSpec
from planner.machine.resharding import ReshardPlanner, reductions_commute, step_between, step_of, step_peak_bytes
from planner.replay.checker import Category, OptimizerMemory, ViolationKind, replay
from planner.replay.memory import path_peak
from planner.replay.structure import path_problem
from planner.schedule.instructions import Compute, Free, Reshard

HALF = {"float32": "bfloat16"}


def test_correct_schedule_has_the_bytes_computed_by_hand():
    report = check(SCHEDULE, seconds=Prices(), limit=1160, devices=2)
    assert report.violations == ()
    # 64 + 64 parameters, 4 statistic, 128 + 4 inputs, 2 * 128 moments.
    assert sum(report.profile.at_start.values()) == 520
    assert report.profile.at_start[Category.OPTIMIZER] == 256
    during = {0: 648, 2: 904, 4: 1096, 8: 1160, 10: 908, 13: 848, 18: 1104, 24: 912, 26: 1040, 34: 720, 36: 720}
    assert {at: int(report.profile.total_during[at]) for at in during} == during
    assert sum(int(held[-1]) for held in report.profile.after.values()) == 528
    assert (report.peak_bytes, report.peak_instruction) == (1160, 8)
    # At the peak: 256 dropped, 64 mask, 256 active, 64 y; w1 was gathered and is freed.
    assert {(tensor.name, tensor.nbytes) for tensor in report.alive_at_peak[:4]} == {
        ("net/forward/aten.native_dropout/2#0", 256),
        ("net/forward/aten.relu/3#0", 256),
        ("adamw state of w1", 128),
        ("adamw state of w2", 128),
    }
    assert sum(tensor.nbytes for tensor in report.alive_at_peak) == 1160
    assert report.profile.after[Category.GRADIENTS].max() == 64
    assert report.profile.after[Category.RESHARDED][0] == 128
    assert report.profile.transient[Category.WORKSPACE][26] == 128


def test_total_is_the_sum_over_instructions():
    report = check(SCHEDULE, seconds=Prices())
    computes = [i for i in SCHEDULE.instructions if isinstance(i, Compute) and not GRAPH.operators[i.operator].is_view]
    expected = sum(1000 + i.operator for i in computes) + 4 * 10 * 2 + 2
    assert report.total_quanta == expected
    assert (report.recomputed, report.reshards, report.collectives) == (1, 4, 4)


def test_state_and_workspace_are_those_of_the_optimizer():
    assert check(SCHEDULE, optimizer=SGD).peak_bytes == 1160 - 256
    assert check(SCHEDULE, optimizer=OptimizerMemory(optimizer_named("sgd_momentum"))).peak_bytes == 1160 - 128
    # In 16 bits everything halves but the mask of 64 bytes and the optimizer: 16 local elements of w1 and w2 each
    # keep a master copy and two moments of 4 bytes, and an update needs three tensors of as many elements and bytes.
    values = [replace(v, spec=replace(v.spec, dtype=HALF.get(v.spec.dtype, v.spec.dtype))) for v in GRAPH.values]
    half = replace(GRAPH, values=tuple(values))
    mixed = check(SCHEDULE, graph=half, optimizer=OptimizerMemory(optimizer_named("adamw_mixed", fused=False)))
    assert mixed.profile.at_start[Category.OPTIMIZER] == 2 * 192
    assert mixed.profile.transient[Category.WORKSPACE][26] == 192
    assert (mixed.peak_bytes, mixed.peak_instruction) == ((912 - 256 - 64) // 2 + 64 + 384 + 192, 26)
    assert sum(tensor.nbytes for tensor in mixed.alive_at_peak) == mixed.peak_bytes
    # One kernel needs the copy of the gradient in 32 bits alone, and no copy of one that has them.
    fused = check(SCHEDULE, graph=half, optimizer=OptimizerMemory(optimizer_named("adamw_mixed")))
    assert fused.profile.transient[Category.WORKSPACE][26] == 64
    alone = check(SCHEDULE, optimizer=OptimizerMemory(optimizer_named("adamw")))
    assert alone.profile.transient[Category.WORKSPACE][26] == 0


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        # (8, 8) float32 on 2x2: 256 bytes whole, 128 halved, 64 quartered.
        ((("S0", "S0"), ("S0", "R"), ("R", "R")), 128 + 256),
        ((("S1", "S1"), ("S1", "R"), ("R", "R")), 128 + 2 * 256),
        ((("Psum", "Psum"), ("S1", "Psum"), ("S1", "S0")), 256 + 128),
        ((("Psum", "R"), ("S0", "R")), 128),
        ((("Psum", "R"), ("R", "R")), 256),
        ((("S0", "R"), ("S1", "R")), 2 * 128),
        ((("R", "R"), ("S1", "R")), 128),
    ],
)
def test_reshard_peaks_on_two_by_two(path, expected):
    make = GraphMaker()
    source = make.input("x", ValueRole.INPUT, (8, 8))
    (first,) = make.operator("relu", [source], [((8, 8), FLOAT)])
    (second,) = make.operator("relu", [first], [((8, 8), FLOAT)])
    make.output(OutputRole.LOSS, second)
    graph = make.graph()
    steps = ScheduleMaker(graph, (2, 2), [("R", "R")])
    (buffer,) = steps.compute(0, [steps.inputs[0]], [path[0]])
    moved = steps.reshard(buffer, *path[1:])
    (result,) = steps.compute(1, [moved], [("R", "R")])
    steps.free(buffer, moved)
    report = replay(graph, steps.schedule([result]), optimizer=ADAMW, devices=4)
    assert report.violations == ()
    local = local_numel((8, 8), path[0], (2, 2)) * 4
    assert int(report.profile.total_during[1]) == 256 + local + expected


@given(
    mesh=st.sampled_from([(2,), (2, 2), (2, 4), (2, 2, 2)]),
    shape=st.sampled_from([(8, 8), (16, 4, 8), (2, 4, 8), (1, 4, 8), (4,), (6, 8)]),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_paths_agree_with_the_resharding_planner(mesh, shape, data):
    words = ["R", "Psum", "Pmax", "Pavg", *(f"S{dim}" for dim in range(len(shape)))]
    placements = [p for p in itertools.product(words, repeat=len(mesh)) if divides(shape, p, mesh)]
    path = [data.draw(st.sampled_from(placements))]
    for _ in range(data.draw(st.integers(1, 4))):
        near = [p for p in placements if sum(a != b for a, b in zip(p, path[-1], strict=True)) == 1]
        path.append(data.draw(st.sampled_from(near)))
    if path[0] == path[-1]:
        return
    legal = all(itertools.starmap(step_between, itertools.pairwise(path))) and reductions_commute(path[0])
    assert legal == (not path_problem(shape, (path[0], path[-1]), tuple(path), mesh))
    for source, target in itertools.pairwise(path):
        step = step_of(shape, mesh, source, target)
        if step is not None:
            sizes = [local_numel(shape, placement, mesh) * 2 for placement in (source, target)]
            shapes = [local_shape(shape, placement, mesh) for placement in (source, target)]
            assert path_peak((source, target), shapes, sizes) == step_peak_bytes(step, *sizes)


@pytest.mark.parametrize(
    ("mesh", "shape"), [((4,), (8, 8)), ((2, 2), (8, 4)), ((2, 2), (2, 4, 4)), ((2, 2, 2), (8, 8))]
)
def test_peaks_of_whole_paths_agree_with_the_resharding_planner(mesh, shape):
    links = [LinkSpec(latency_seconds=1e-6, bandwidth=10.0**9 * (axis + 1)) for axis in range(len(mesh))]
    planner = ReshardPlanner(links, mesh, memory_bandwidth=1e10, launch_seconds=1e-6)
    words = ["R", "Psum", *(f"S{dim}" for dim in range(len(shape)))]
    placements = [p for p in itertools.product(words, repeat=len(mesh)) if divides(shape, p, mesh)]
    steps = set()
    for source, target in itertools.permutations(placements, 2):
        path = planner.path(shape, 4, source, target)
        if path is not None:
            sizes = [local_numel(shape, placement, mesh) * 4 for placement in path.placements]
            shapes = [local_shape(shape, placement, mesh) for placement in path.placements]
            assert path_peak(path.placements, shapes, sizes) == path.peak_bytes
            assert not path_problem(shape, (source, target), path.placements, mesh)
            steps.add(len(sizes) - 1)
    assert max(steps) >= len(mesh)


def random_program(draw):
    """A chain of operators, views and reshards in which buffers die at random moments after their last use."""
    make = GraphMaker()
    values = [make.input("x", ValueRole.INPUT, (8, 8)), make.parameter("w", (8, 8))]
    for _ in range(draw(st.integers(1, 12))):
        view = draw(st.booleans())
        inputs = [draw(st.sampled_from(values)) for _ in range(1 if view else draw(st.integers(1, 3)))]
        count = draw(st.integers(1, 2))
        values += make.operator("op", inputs, [((8, 8), FLOAT)] * count, view=view)
    make.output(OutputRole.LOSS, values[-1])
    graph = make.graph()
    rows, whole = ("S0",), ("R",)
    steps = ScheduleMaker(graph, (2,), [whole, rows])
    held = dict(zip(graph.inputs, steps.inputs, strict=True))
    extra: list[int] = []
    for operator in graph.operators:
        inputs = [held[value] for value in operator.inputs]
        if draw(st.booleans()):
            source = inputs[0]
            there = rows if steps.buffers[source].placement == whole else whole
            inputs[0] = steps.reshard(source, there)
            extra.append(inputs[0])
        placements = [draw(st.sampled_from([rows, whole])) for _ in operator.outputs]
        held.update(zip(operator.outputs, steps.compute(operator.index, inputs, placements), strict=True))
        if extra and draw(st.booleans()):
            steps.free(extra.pop(draw(st.integers(0, len(extra) - 1))))
    loss = held.pop(graph.outputs[0].value)
    if steps.buffers[loss].placement != whole:
        extra.append(loss)
        loss = steps.reshard(loss, whole)
    dying = extra + [held[value] for value in held if value not in graph.inputs]
    for buffer in draw(st.permutations(dying)):
        steps.free(buffer)
    return graph, steps.schedule([loss])


def naive_bytes(graph, schedule):
    """Bytes after each instruction from sets of buffers per storage, nothing precomputed."""
    storages: dict[int, set[int]] = {}
    sizes: dict[int, int] = {}

    def own(buffer):
        entry = schedule.buffers[buffer]
        storages[buffer] = {buffer}
        sizes[buffer] = local_numel((8, 8), entry.placement, schedule.mesh) * 4

    for buffer in schedule.inputs:
        own(buffer)
    result = []
    for instruction in schedule.instructions:
        match instruction:
            case Compute(operator, inputs, outputs):
                for buffer in outputs:
                    if graph.operators[operator].is_view:
                        next(members for members in storages.values() if inputs[0] in members).add(buffer)
                    else:
                        own(buffer)
            case Reshard(_, target):
                own(target)
            case Free(buffers):
                for members in storages.values():
                    members.difference_update(buffers)
        result.append(sum(sizes[owner] for owner, members in storages.items() if members))
    return result


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_bytes_equal_a_naive_simulation(data):
    graph, schedule = random_program(data.draw)
    report = replay(graph, schedule, optimizer=SGD)
    assert report.violations == ()
    expected = naive_bytes(graph, schedule)
    assert sum(report.profile.after.values()).tolist() == expected
    assert report.peak_bytes == report.profile.total_during.max()
    assert sum(tensor.nbytes for tensor in report.alive_at_peak) == expected[report.peak_instruction]


def test_unpriced_instruction_leaves_no_total():
    class Partly(Prices):
        def compute_quanta(self, operator, outputs, inputs):
            return {1: 5}[operator]

    report = check(SCHEDULE, seconds=Partly())
    assert report.kinds == {ViolationKind.UNPRICED}
    assert report.total_quanta is None


def long_schedule(operators):
    """A chain of operators with a reshard after every second one, and its graph."""
    make = GraphMaker()
    value = make.input("x", ValueRole.INPUT, (64, 64))
    for _ in range(operators):
        (value,) = make.operator("relu", [value], [((64, 64), FLOAT)])
    make.output(OutputRole.LOSS, value)
    graph = make.graph()
    steps = ScheduleMaker(graph, (2, 2), [("S0", "R")])
    buffer = steps.inputs[0]
    for index in range(operators):
        (new,) = steps.compute(index, [buffer], [steps.buffers[buffer].placement])
        if index:
            steps.free(buffer)
        if index % 2:
            there = ("S1", "R") if steps.buffers[new].placement == ("S0", "R") else ("S0", "R")
            target = steps.reshard(new, there)
            steps.free(new)
            new = target
        buffer = new
    result = steps.reshard(buffer, ("R", "R"))
    steps.free(buffer)
    return graph, steps.schedule([result])


@contextmanager
def lines_run():
    """Counts the lines of Python that are run, those of comprehensions for each of their elements."""
    lines = 0

    def count(frame, event, argument):
        nonlocal lines
        lines += event == "line"
        return count

    former = sys.gettrace()
    sys.settrace(count)
    try:
        yield lambda: lines
    finally:
        sys.settrace(former)


def test_the_time_of_a_replay_grows_with_its_instructions():
    """Eight times as many instructions run eight times as many lines; a step that looked at all others would run 64."""
    allowed = {(((a, "R"),), ((a, "R"),)) for a in ("S0", "S1")}
    taken = []
    for operators in (240, 1_920):
        graph, schedule = long_schedule(operators)
        with lines_run() as count:
            report = replay(graph, schedule, optimizer=ADAMW, seconds=Prices(), allowed=lambda operator: allowed)
        taken.append(count())
        assert report.ok
        assert report.peak_bytes == 64 * 64 * 4 * 2
        assert report.profile.total_during.dtype == np.int64
    assert len(schedule.instructions) > 5_000
    assert taken[1] < 9 * taken[0]
