"""Weights of a step's costs: lower bounds on plans whose communication runs beside the computation.

A plan may gather parameters early and reduce gradients late, beside the computation; resharded activations stay on its
way. However it does so, consecutive operators make up *windows* ``k = 1 .. K``, the updates a last one, and a window
takes the time ``T_k`` from its first operator to that of the next window. With the computation ``C_k``, the costs of
resharded activations ``X_k``, and what the link of axis ``a`` carries meanwhile, ``A_ka`` of activations and ``L_ka``
of gathers and reductions,

    ``T_k >= c_k C_k + x_k X_k + sum_a (y_ka A_ka + l_ka L_ka)``

for weights out of a polytope: one stream counts whole, or the computation whole and a link by as much as both slow each
other down. A gather has ended when window ``k`` needs it, and a reduction begins when window ``k`` has made its
gradient. So the sum over all windows is at least the same canonical problem with other costs: a gather costs its link
time times ``min_{j <= k} l_ja``, and a reduction ``min_{j >= k} l_ja``. Its optimum bounds all plans from below. The
weights with the best bound come from a small linear program (:mod:`planner.overlap.multipliers`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from formulations.problem.strategy_problem import IntArray
from formulations.step.training_step import GradientEdge, NodeKind, ResultEdge, StepEdge, StepModel


@dataclass(frozen=True, slots=True, eq=False)
class StepWeights:
    """Weights of costs by the operator at which they are paid, reruns at the backward operator behind them.

    Parameters
    ----------
    scale
        A bound of the weighted problem is ``scale`` times one in quanta.
    computation, resharding
        Weight of operators, and of the costs of resharded activations and results, shape ``(nodes,)``.
    activations, gathers
        Weights of the link time of what an operator reads, shape ``(axes, nodes)``: of resharded activations, and of
        parameters and inputs of the step.
    reductions
        Weight of the link time of gradients by the operator that makes them, shape ``(axes, nodes)``.
    updates
        Weight of all updates.
    """

    scale: int
    computation: IntArray
    resharding: IntArray
    activations: IntArray
    gathers: IntArray
    reductions: IntArray
    updates: int


def is_gather(model: StepModel, edge: StepEdge) -> bool:
    """Whether an argument is a parameter or another input of the step."""
    return model.nodes[edge.producer].kind in (NodeKind.PARAMETER, NodeKind.INPUT)


def execution_price(model: StepModel, node: int, moments: Sequence[int]) -> IntArray:
    """Cost of executions of a node at these moments per layout, shape ``(S,)``, by the model's weights."""
    cost = model.nodes[node].cost
    if model.weights is None:
        return len(moments) * cost
    return int(model.weights.computation[list(moments)].sum()) * cost


def argument_weights(model: StepModel, edge: StepEdge, moments: Sequence[int]) -> tuple[int, ...]:
    """Weights of an argument's cost and of its link time per axis, for executions of its reader at these moments."""
    if model.weights is None:
        return (len(moments),)
    at = list(moments)
    gathered = is_gather(model, edge)
    links = model.weights.gathers if gathered else model.weights.activations
    resharding = 0 if gathered else int(model.weights.resharding[at].sum())
    return resharding, *(int(weight) for weight in links[:, at].sum(axis=1))


def gradient_price(model: StepModel, gradient: GradientEdge) -> IntArray:
    """Cost of a gradient's reduction, shape ``(S_producer, S_parameter)``, by the model's weights."""
    if model.weights is None:
        return gradient.cost
    return weighted(gradient.cost, gradient.link_cost, (0, *model.weights.reductions[:, gradient.producer]))


def result_price(model: StepModel, result: ResultEdge) -> IntArray:
    """Cost of a result, shape ``(S_producer,)``, by the model's weights."""
    return result.cost if model.weights is None else int(model.weights.resharding[result.producer]) * result.cost


def update_price(model: StepModel, node: int) -> IntArray:
    """Cost of a parameter's update per layout, shape ``(S,)``, by the model's weights."""
    cost = model.nodes[node].update_cost
    assert cost is not None
    return cost if model.weights is None else model.weights.updates * cost


def weighted(cost: IntArray, link_cost: IntArray | None, weights: Sequence[int]) -> IntArray:
    """A table of costs and those of its link times, shape ``(axes, *cost.shape)``, times their weights.

    Plain costs are returned as they are, since equal tables of a deep model are shared.
    """
    if tuple(weights) == (1,):
        return cost
    total = int(weights[0]) * cost
    if len(weights) > 1:
        assert link_cost is not None, "weights need the time on each link"
        for weight, table in zip(weights[1:], link_cost, strict=True):
            total = total + int(weight) * table
    return total
