"""Formulations by the names that users give: optimization models, and the baselines they are compared with.

==========================  ==============================================================================
``sharding``                layouts alone (Alpa's problem, with memory true at every moment)
``kiwi_reduced``            layouts and recomputation, as the paper reduces it
``kiwi_chain``              layouts and recomputation of whole chains
``kiwi_full``, ...          KIWI's own programs, for small steps (:mod:`formulations.kiwi.of_step`)
``kiwi_offload``            the same, and activations that are offloaded to host memory
``checkpoint_dots``, ...    layouts, recomputation by a rule (:mod:`planner.strategies.baselines`)
``checkmate``               recomputation alone, the layouts those of data parallelism (Jain et al. 2020)
``alpa_then_checkmate``     the best layouts without a limit, then recomputation
==========================  ==============================================================================

All are problems over the same tables, so all go through the same costs, the same replay and the same executor.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from formulations.kiwi.of_step import PROGRAMS
from formulations.problem.solution import SolveResult, Status
from formulations.problem.strategy_problem import BoolArray, IntArray, StrategyProblem
from formulations.step.kiwi_chain import latest_moments
from formulations.step.offload.modes import Links
from formulations.step.solving.registry import (
    MODELS,
    UnknownFormulationError,
    kiwi_chain_problem,
    kiwi_offload_problem,
    policy_problem,
    sharding_problem,
    step_problem,
)
from formulations.step.solving.step_problem import StepProblem
from planner.common.infeasibility import InfeasibleError
from planner.graph.operator_graph import ValueRole
from planner.graph.placement import replicated, shard
from planner.layers.plan.choices import CHOICES
from planner.scheduling.offload_model import with_transfer_costs
from planner.strategies.baselines import BASELINES
from planner.strategies.space import StrategySpace

CHECKMATE = "checkmate"
ALPA_THEN_CHECKMATE = "alpa_then_checkmate"

OFFLOAD = "kiwi_offload"

FORMULATIONS = (*MODELS, OFFLOAD, *BASELINES, CHECKMATE, ALPA_THEN_CHECKMATE, *PROGRAMS)
"""Names of all formulations."""

PUBLISHED = {"kiwi_reduced": "kiwi_reduced_published", "kiwi_full": "kiwi_full_published"}
"""The paper's own program by the name of the formulation that solves the same problem.

Both choose among the same decisions and price them alike, and their plans keep the same limit when they are executed.
``kiwi_full`` and its published form are two programs of one problem. All count resharded copies and workspaces while
they search, but with ``paper`` as their memory model (:mod:`formulations.kiwi.of_step`). What still differs is when the
published program of ``kiwi_reduced`` frees: what waits for a recomputation stays until the operator behind it has run
as well. So its plan is never cheaper than the optimum of the formulation, and its bound is one of what it counts.
"""

Solve = Callable[[StrategyProblem], SolveResult]


def formulation_problem(
    name: str,
    space: StrategySpace,
    memory_limit: int | None,
    solve: Solve,
    links: Links,
    copy_quanta: Callable[[IntArray], IntArray],
) -> StepProblem:
    """Build the problem of a formulation.

    Parameters
    ----------
    name
        One of :data:`FORMULATIONS`.
    space
        The step's strategies and tables.
    memory_limit
        Bytes on one device, or None.
    solve
        Solves the first of two problems, for formulations that decide one thing after the other; a first problem has
        no memory limit.
    links, copy_quanta
        Links to the host, and the time of a copy in quanta by its bytes; for ``kiwi_offload``.

    Raises
    ------
    UnknownFormulationError
        If there is no such formulation; the message lists the known ones.
    ValueError
        If the step has no data-parallel layouts on the mesh (``checkmate``).
    InfeasibleError
        If ``solve`` found no layouts to start from.
    """
    model = space.model
    if name == "kiwi_chain":
        return kiwi_chain_problem(model, memory_limit, rule_based_reruns(space))
    if name == OFFLOAD:
        priced = with_transfer_costs(model, copy_quanta)
        return kiwi_offload_problem(priced, memory_limit, links, rule_based_reruns(space))
    if name in MODELS:
        return step_problem(name, model, memory_limit)
    if name in BASELINES:
        return policy_problem(model, memory_limit, space.recomputed_by_rule[name])
    if name in PROGRAMS:
        raise UnknownFormulationError(f"model formulation {name!r} is no canonical problem; choose kiwi_chain")
    if name not in FORMULATIONS:
        raise UnknownFormulationError(
            f"model formulation {name!r} is not known; choose one of {', '.join(FORMULATIONS)}, "
            f"or for a plan of layers {', '.join(name for name in CHOICES if name not in PROGRAMS)}"
        )
    first = sharding_problem(model, None)
    if name == CHECKMATE:
        first = first.only(_data_parallel(space))
    found = solve(first.problem)
    chosen = found.choices
    mesh = "x".join(map(str, space.mesh))
    if found.status in (Status.INFEASIBLE, Status.INFEASIBLE_UNCONFIRMED):
        raise ValueError(f"{name}: mesh {mesh} allows no layouts to start from for this step")
    if chosen is None:
        raise InfeasibleError(
            f"{name}: no layouts to start from were found on mesh {mesh} in {found.seconds:.0f} s; allow more time"
        )
    fixed = {i: np.arange(node.size) == chosen[i] for i, node in enumerate(model.nodes)}
    return kiwi_chain_problem(model, memory_limit, rule_based_reruns(space)).only(fixed)


def rule_based_reruns(space: StrategySpace) -> list[dict[int, int]]:
    """Reruns of every policy, each as late as possible."""
    return [latest_moments(space.model, dict.fromkeys(nodes)) for nodes in space.recomputed_by_rule.values()]


def _data_parallel(space: StrategySpace) -> dict[int, BoolArray]:
    """Layouts of data parallelism: inputs sharded along the batch on every mesh axis, parameters replicated."""
    whole, split = replicated(len(space.mesh)), (shard(0),) * len(space.mesh)
    found: dict[int, BoolArray] = {}
    for k, node in enumerate(space.nodes):
        if node.value is None:
            continue
        placements = [strategy.outputs[0] for strategy in space.strategies[k]]
        role = space.graph.values[node.value].role
        wanted = split if role is ValueRole.INPUT and split in placements else whole
        found[k] = np.array([placement == wanted for placement in placements])
    return found
