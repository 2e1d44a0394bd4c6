"""Decisions about compiled steps against all decisions there are, on random kernels."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
from support.tiers import first

from formulations.problem.solution import SolveOptions, Status
from formulations.step.kiwi_chain import chain_moments
from formulations.step.modes import needed_reruns
from formulations.step.replay import replay_decision
from formulations.step.solving.context import SolveContext
from formulations.step.training_step import StepDecision
from planner.compiled.kernel_seconds import KernelSeconds
from planner.compiled.recompute import JointStep
from planner.graph.kernel_graph import CompileError, Kernel, KernelGraph, Tensors
from planner.machine.cluster import load_cluster

CLUSTER = load_cluster("h100-8-nvlink")


def kernel(name: str, reads: list[str], writes: list[str], work: int, is_random: bool = False) -> Kernel:
    targets = (("aten.mm.default", Tensors(0, 0)),)
    return Kernel((name,), targets, tuple(reads), tuple(writes), work, "float32", is_random, is_generated=False)


def random_step(seed: int) -> JointStep:
    """Up to six forward kernels, of which the backward reads some values again; ties and empty values among them."""
    draw = random.Random(seed)
    count = draw.randint(1, 6)
    sizes = {"x": draw.choice([0, 4]), "loss'": 1}
    forward, made = [], ["x"]
    for k in range(count):
        writes = [f"v{k}.{output}" for output in range(draw.choice([1, 1, 2]))]
        sizes |= {name: draw.choice([0, 1, 2, 4, 4, 8]) for name in writes}
        reads = draw.sample(made, min(len(made), draw.choice([1, 1, 2])))
        forward.append(kernel(f"f{k}", reads, writes, draw.choice([0, 10, 10, 40]) * 10**9, draw.random() < 0.1))
        made += writes
    activations = made[1:]
    backward, gradient = [], "loss'"
    for k in reversed(range(count)):
        reads = [gradient, *draw.sample(activations, min(len(activations), draw.choice([0, 1, 2])))]
        gradient = f"g{k}"
        sizes[gradient] = draw.choice([1, 2, 4])
        backward.append(kernel(f"b{k}", reads, [gradient], draw.choice([10, 20]) * 10**9))
    held = random.Random(f"workspaces {seed}")
    workspaces = {each.operators[0]: held.choice([0, 0, 2, 6]) for each in (*forward, *backward)}
    kept = tuple(name for name in activations if any(name in each.reads for each in backward))
    returned = (activations[-1],) if draw.random() < 0.7 else ()
    return JointStep(
        KernelGraph(tuple(forward), sizes, ("x",), returned, kept, {}),
        KernelGraph(tuple(backward), sizes, ("x", *kept, "loss'"), (gradient,), (), {}),
        KernelSeconds(CLUSTER),
        draw.choice([0, 3]),
        workspaces=workspaces,
    )


def all_decisions(step: JointStep) -> list[tuple[int, int]]:
    """Cost and peak of every decision that a cut can express: one copy of a value in the backward, before its readers.

    Where a kernel and one that reads it run again, the second reads the new copy, as torch's cut keeps a value or
    computes it again.
    """
    moments = chain_moments(step.model)
    found = []
    for choice in product(*((None, *times) for times in moments.values())):
        wanted = {i: (at,) for i, at in zip(moments, choice, strict=True) if at is not None}
        edges = [edge for edge in step.model.edges if edge.producer in wanted and edge.consumer in wanted]
        in_order = all(wanted[edge.producer] <= wanted[edge.consumer] for edge in edges)
        if in_order and needed_reruns(step.model, wanted) == wanted:
            executed = replay_decision(step.model, StepDecision((0,) * len(step.model.nodes), wanted))
            found.append((executed.cost, executed.peak))
    return found


def decide(step: JointStep, limit: int) -> tuple[frozenset[int], int, Status] | None:
    context = partial(SolveContext, solver="branch_and_bound", options=SolveOptions(time_limit=20.0, workers=1))
    try:
        again, result = step.decide(limit, context)
    except CompileError:
        return None
    assert result.objective is not None
    return again, result.objective, result.status


@pytest.mark.parametrize("seed", first(20, range(400)))
def test_decisions_are_the_best_of_all(seed: int) -> None:
    step = random_step(seed)
    found = all_decisions(step)
    peaks = sorted({peak for _, peak in found})
    for limit in {peaks[0] - 1, peaks[0], peaks[len(peaks) // 2], peaks[-1]}:
        fitting = [cost for cost, peak in found if peak <= limit]
        decided = decide(step, limit) if limit > 0 else None
        if not fitting:
            assert decided is None
            continue
        if decided is None:
            assert limit == 0
            continue
        _, cost, status = decided
        assert (cost, status) == (min(fitting), Status.OPTIMAL)


def test_what_is_kept_and_what_runs_again() -> None:
    sizes = {"x": 4, "a": 8, "b": 8, "g": 4, "loss'": 1}
    forward = (kernel("f0", ["x"], ["a"], 0), kernel("f1", ["a"], ["b"], 0))
    backward = (kernel("b0", ["loss'", "b", "a"], ["g"], 0),)
    step = JointStep(
        KernelGraph(forward, sizes, ("x",), (), ("a", "b"), {}),
        KernelGraph(backward, sizes, ("x", "a", "b", "loss'"), ("g",), (), {}),
        KernelSeconds(CLUSTER),
    )
    assert step.resident == 4
    assert step.values_kept(frozenset()) == {"a": 8, "b": 8}
    assert step.values_kept(frozenset({1})) == {"a": 8}
    assert step.kernels_again(frozenset({0, 1})) == [(("f0",), ("a",)), (("f1",), ("b",))]
    # x, a and b, the loss's gradient and the result of the only backward kernel
    assert step.as_cut().peak == 4 + 8 + 8 + 1 + 4


def test_what_a_kernel_holds_while_it_runs_counts_at_its_moment() -> None:
    sizes = {"x": 4, "a": 8, "b": 2, "g": 4, "loss'": 1}
    graphs = (
        KernelGraph((kernel("f0", ["x"], ["a"], 0), kernel("f1", ["a"], ["b"], 0)), sizes, ("x",), (), ("b",), {}),
        KernelGraph((kernel("b0", ["loss'", "b"], ["g"], 0),), sizes, ("x", "b", "loss'"), ("g",), (), {}),
    )
    peaks = {
        name: JointStep(*graphs, KernelSeconds(CLUSTER), workspaces={name: 5}).as_cut().peak
        for name in ("f0", "f1", "b0")
    }
    assert peaks == {"f0": 4 + 8 + 5, "f1": 4 + 8 + 2 + 5, "b0": 4 + 2 + 1 + 4 + 5}


def test_a_random_kernel_never_runs_again() -> None:
    sizes = {"x": 4, "a": 8, "b": 8, "g": 4, "loss'": 1}
    forward = (kernel("f0", ["x"], ["a"], 0, is_random=True), kernel("f1", ["a"], ["b"], 0))
    backward = (kernel("b0", ["loss'", "b"], ["h"], 0), kernel("b1", ["h", "a"], ["g"], 0))
    step = JointStep(
        KernelGraph(forward, sizes | {"h": 1}, ("x",), (), ("a", "b"), {}),
        KernelGraph(backward, sizes | {"h": 1}, ("x", "a", "b", "loss'"), ("g",), (), {}),
        KernelSeconds(CLUSTER),
    )
    assert not step.model.rerunnable[1]
    assert step.model.rerunnable[2]


def test_a_gradient_written_over_an_activation_leaves_its_kernel_free_to_run_again() -> None:
    sizes = {"x": 4, "a": 8, "b": 8, "g": 8, "loss'": 1}
    forward = (kernel("f0", ["x"], ["a"], 0), kernel("f1", ["a"], ["b"], 0))
    backward = (replace(kernel("b0", ["loss'", "b", "a"], ["g"], 0), overwrites=(("g", "a"),)),)
    graphs = (
        KernelGraph(forward, sizes, ("x",), (), ("a", "b"), {}),
        KernelGraph(backward, sizes, ("x", "a", "b", "loss'"), ("g",), (), {}),
    )
    step, cut = (JointStep(*graphs, KernelSeconds(CLUSTER), fixed=fixed) for fixed in (False, True))
    assert step.model.rerunnable[1]
    assert not cut.model.rerunnable[1]
    assert step.as_cut().peak == 4 + 8 + 8 + 1 + 8
    assert cut.as_cut().peak == 4 + 8 + 8 + 1
