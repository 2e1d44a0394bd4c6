r"""CAPTURE's problem as a canonical problem: stages within a limit, solved by the solvers of the house.

Node ``k`` is the state in front of the ``k``-th stage from the end: layers placed and GPUs filled so far. The paper's
section III-C is the factor between two states. A stage runs all layers between them, and has GPUs of one node. So every
layer and every GPU has one stage, and stages fill the nodes in order. A pair of states is forbidden where there is no
such stage, or where it holds more than the limit. In front of the first stage nothing is placed, and slots that a plan
does not need stay there. The least peak is the least limit at which there is an assignment: a bisection.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from formulations.capture.problem import CapturePlan, PartitionProblem, PlannedStage
from formulations.problem.strategy_problem import Factor, IntArray, Node, StrategyProblem
from formulations.solvers import solve_in_process

__all__ = ["capture_problem", "least_peak_by_solver"]

_NONE = np.iinfo(np.int64).max


def capture_problem(problem: PartitionProblem, limit: int) -> StrategyProblem:
    """Build the canonical problem, which has an assignment where there is a plan; nothing costs anything.

    Parameters
    ----------
    problem
        Stages and GPUs.
    limit
        Bytes that a stage may hold on a GPU.
    """
    states = _states(problem)
    nodes = tuple(Node(f"before stage {k} from the end", np.zeros(len(of), np.int64)) for k, of in enumerate(states))
    factors = []
    for behind, (after, before) in enumerate(pairwise(states)):
        held, _ = _stages(problem, behind, before, after)
        factors.append(Factor((behind + 1, behind), np.zeros_like(held), (held > limit) | (held == _NONE)))
    return StrategyProblem("capture", nodes, tuple(factors), (), 0)


def least_peak_by_solver(problem: PartitionProblem, solver: str = "tree_dp") -> CapturePlan | None:
    """Bisect the limit; return a plan of least peak, or None where there is no plan.

    Parameters
    ----------
    problem
        Stages and GPUs.
    solver
        A solver of canonical problems that proves what it says and runs in this process.
    """
    sizes = np.unique(problem.peaks[np.broadcast_to(problem.allowed, problem.peaks.shape)]).tolist()
    low, high, plan = 0, len(sizes), None
    while low < high:
        middle = (low + high) // 2 if plan is not None else high - 1
        found = solve_in_process(capture_problem(problem, sizes[middle]), solver)
        if found.choices is not None:
            high, plan = middle, _plan(problem, found.choices)
        elif plan is None:
            return None
        else:
            low = middle + 1
    return plan


def _plan(problem: PartitionProblem, choices: tuple[int, ...]) -> CapturePlan:
    """Read a plan from an assignment."""
    chosen = [of[choice : choice + 1] for of, choice in zip(_states(problem), choices, strict=True)]
    plan = []
    for behind, (after, before) in enumerate(pairwise(chosen)):
        if (before != after).any():
            _, configuration = _stages(problem, behind, before, after)
            plan.append(PlannedStage(int(after[0, 0]), int(configuration[0, 0])))
    return tuple(reversed(plan))


def _states(problem: PartitionProblem) -> list[IntArray]:
    """Layers placed and GPUs filled in front of the last 0, 1, .. stages, nothing first; shape ``(states, 2)`` each."""
    found = [np.array([[problem.layers, problem.gpus]])]
    for behind in range(1, min(problem.layers, problem.gpus)):
        gpu = np.unique(found[-1][:, 1:] - problem.degrees)
        inside = [(layer, g) for g in gpu[gpu > 0].tolist() for layer in range(1, problem.layers - behind + 1)]
        found.append(np.array([(0, 0), *inside]))
    return [*found, np.zeros((1, 2), dtype=np.int64)]


def _stages(problem: PartitionProblem, behind: int, before: IntArray, after: IntArray) -> tuple[IntArray, IntArray]:
    """Least bytes of a GPU, and the configuration, of the stages between states; :data:`_NONE` bytes for no stage."""
    (first, gpu), (end, filled) = before.T[:, :, None], after.T[:, None, :]
    degree = filled - gpu
    fits = problem.allowed[:, first, end] & (problem.degrees[:, None, None] == degree) & (degree <= problem.room[gpu])
    held = np.where(fits, problem.peaks[min(behind, len(problem.peaks) - 1)][:, first, end], _NONE)
    least: IntArray = held.min(axis=0)
    least[(first == end) & (degree == 0) & (first == 0)] = 0  # a slot without a stage
    return least, held.argmin(axis=0)
