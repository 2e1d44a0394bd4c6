"""A traced training step as the paper's instance, and the paper's programs as formulations of it.

The paper counts inputs, parameters and outputs. So an operator has the bytes of all its outputs, and parameters those
of their optimizer states. With ``engine``, the default of :data:`MEMORY_MODELS`, the programs count what the engine
holds beside them too (:mod:`formulations.kiwi.extras`), at the moment at which it does; ``paper`` leaves it out. What
the schedule of a plan cannot express is left out: backward operators run once, and forward operators run again before a
backward operator only.

Where something is not counted, a decision may hold more than the limit when the step is replayed. Then the program is
solved again with as much less, until a decision fits; the bound is that of the program under the limit itself, as it
counts. The paper's count needs that often, the engine's only for updates that hold extra bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

import numpy as np

from formulations.kiwi.extras import extras_of
from formulations.kiwi.graph import GraphError, KiwiEdge, KiwiGraph, KiwiOperator
from formulations.kiwi.schedule import StagedDecision
from formulations.kiwi.solve import solve_kiwi
from formulations.problem.solution import KnownBound, SolveOptions, SolveResult
from formulations.problem.strategy_problem import StrategyProblem
from formulations.step.solving.context import SolveContext
from formulations.step.solving.registry import sharding_problem
from formulations.step.solving.solved import SolvedStep, certified
from formulations.step.training_step import StepDecision, StepModel

__all__ = ["MEMORY_MODELS", "MOST_OPERATORS", "PROGRAMS", "MemoryModel", "kiwi_graph", "solve_program", "step_decision"]

MOST_OPERATORS: Mapping[str, int] = {
    "kiwi_full": 40,
    "kiwi_full_published": 30,
    "kiwi_reduced_published": 60,
}
"""Operators that run, up to which a program is built.

Measured on perceptrons, seconds of one core: ``kiwi_full`` has a gap of 1 % with 38 operators after 5 s;
``kiwi_full_published`` has 18,408 columns with 26 operators, a plan after 18 s and a gap of 77 % then;
``kiwi_reduced_published`` has a plan with 54 operators after 3 s, a gap of 37 % then, and none with 110.
"""

PROGRAMS = tuple(MOST_OPERATORS)
"""Formulations of a step that are programs of this room."""


MemoryModel = Literal["engine", "paper"]

MEMORY_MODELS: tuple[MemoryModel, ...] = ("engine", "paper")
"""Counts of bytes, the default first; see the module docstring."""


def kiwi_graph(model: StepModel, memory_model: MemoryModel = "engine") -> KiwiGraph:
    """Return the instance of a step; operators and strategies have the numbers of its nodes and layouts.

    Costs are those of the step for decisions that the graph's programs may take. The memory model is one of
    :data:`MEMORY_MODELS`.
    """
    ends = {edge.producer for edge in model.gradients} | {edge.producer for edge in model.results}
    costs = [node.cost.copy() for node in model.nodes]
    for result in model.results:
        costs[result.producer] = costs[result.producer] + result.cost
    operators = []
    for i, node in enumerate(model.nodes):
        resident = i < _residents(model)
        held = node.resident_bytes if resident else node.output_bytes.sum(axis=1)
        operators.append(
            KiwiOperator(node.name, node.kind, np.zeros_like(costs[i]) if resident else costs[i], held, stays=i in ends)
        )
    edges = [KiwiEdge(edge.producer, edge.consumer, edge.cost, edge.forbidden) for edge in model.edges]
    updated: set[int] = set()
    for gradient in model.gradients:
        cost, update = gradient.cost.T, model.nodes[gradient.parameter].update_cost
        if update is not None and gradient.parameter not in updated:
            cost = cost + update[:, None]
            updated.add(gradient.parameter)
        edges.append(KiwiEdge(gradient.parameter, gradient.producer, cost, gradient.forbidden.T))
    again = tuple(model.rerunnable.tolist())
    extras = extras_of(model) if memory_model == "engine" else ()
    return KiwiGraph("step", tuple(operators), tuple(edges), model.seconds_per_cost, again, extras)


def step_decision(graph: KiwiGraph, decision: StagedDecision) -> StepDecision:
    """Return a decision of a graph of :func:`kiwi_graph` as one of its step."""
    moments: dict[int, list[int]] = {}
    for t, stage in enumerate(decision.stages):
        for i in stage[:-1]:
            moments.setdefault(i, []).append(graph.residents + t)
    return StepDecision(decision.strategies, {i: tuple(found) for i, found in moments.items()})


def solve_program(
    model: StepModel,
    memory_limit: int | None,
    formulation: str,
    context: SolveContext,
    memory_model: MemoryModel = "engine",
) -> SolvedStep | SolveResult:
    """Find a decision within the limit when it is executed; where none is found, return the last result.

    Parameters
    ----------
    model
        The step.
    memory_limit
        Bytes on one device, or None.
    formulation
        One of :data:`PROGRAMS`.
    context
        Executes decisions; options and workers.
    memory_model
        One of :data:`MEMORY_MODELS`.

    Raises
    ------
    GraphError
        The step has more operators than :data:`MOST_OPERATORS` allows.
    """
    running, most = len(model.nodes) - _residents(model), MOST_OPERATORS[formulation]
    if running > most:
        raise GraphError(
            f"{formulation}: the step runs {running} operators, and its program has a size beyond what is solved with "
            f"more than {most}; use kiwi_chain or kiwi_reduced, which have no such limit, or a smaller model"
        )
    graph, limit, known = kiwi_graph(model, memory_model), memory_limit, None
    deadline = time.monotonic() + context.options.time_limit
    while True:
        left = replace(context.options, time_limit=max(0.1, deadline - time.monotonic()))
        found = solve_kiwi(graph, limit, formulation, _exactly(left), context.pool, context.progress)
        result = found.result
        if known is None and result.bound is not None and result.proof is not None:
            known = KnownBound(result.bound, result.proof, result.proved_by)
        if found.decision is None:
            return result
        decision = step_decision(graph, found.decision)
        executed = context.execute(decision)
        if memory_limit is None or executed.peak <= memory_limit:
            result = replace(result, peak_usage=(executed.peak,))
            return SolvedStep(decision, certified(result, known, executed.cost), _without_limit(model))
        assert limit is not None, "there is a limit"
        if time.monotonic() >= deadline or executed.peak - memory_limit > limit:
            note = f"the best decision holds {executed.peak} bytes with its copies, the limit is {memory_limit}"
            return replace(result, choices=None, objective=None, message=f"{note}; {result.message}")
        limit -= executed.peak - memory_limit


def _residents(model: StepModel) -> int:
    return sum(node.kind in ("input", "parameter") for node in model.nodes)


def _exactly(options: SolveOptions) -> SolveOptions:
    return replace(options, relative_gap=0.0, initial_choices=None)


def _without_limit(model: StepModel) -> Callable[[], StrategyProblem]:
    """Layouts without a limit cost no more than any decision."""
    return lambda: sharding_problem(model, None).problem
