r"""The joint problem restated for CP-SAT, to compare :mod:`formulations.galvatron.joint` with a general solver.

One model for every number of stages ``P``, batch and number ``m`` of micro-batches. Binary :math:`z_{lis}` says that
layer ``l`` is in stage ``i`` and has strategy ``s``; stages are filled in order. :math:`w_{licd} \ge` both neighbours
``l - 1`` and ``l`` are in stage ``i`` with layouts ``c`` and ``d``. Then

.. math::
    \min\; (m - 1) t + \sum_i C_i, \quad t \ge C'_i, \quad
    \sum_k O_{ms} z_{ki} + \sum_{k \le l} O_f z_{ki} + O_b z_{li} \le E \quad \forall l, i,

where ``C`` and ``C'`` are linear in ``z`` and ``w``. A layer outside the stage only leaves terms out, so all ``l`` may
be demanded. A later model has to be faster than the best plan of the earlier ones.
"""

from __future__ import annotations

import time
from fractions import Fraction
from itertools import product
from typing import Any

import numpy as np

from formulations.galvatron.joint import JointResult
from formulations.galvatron.pipeline import PipelinePlan, PipelineProblem

__all__ = ["solve_joint_by_cpsat"]


def solve_joint_by_cpsat(problem: PipelineProblem, time_limit: float = 60.0) -> JointResult:
    """Find the plan with most samples per second by CP-SAT, on one thread.

    It imports ortools, so HiGHS cannot be used in the same process.

    Parameters
    ----------
    problem
        The problem, without tied layers.
    time_limit
        Seconds for all models together, building them included; the bound covers those that were not solved.

    Raises
    ------
    ValueError
        Layers are tied.
    """
    if problem.tied:
        raise ValueError(f"layers {problem.tied} are tied, which the restatement leaves out; use solve_joint")
    deadline = time.monotonic() + time_limit
    best: PipelinePlan | None = None
    best_cost, lower = 0, []
    for stages, batch in product(problem.usable_degrees, problem.batches):
        for micro_batches in problem.rule.counts(batch, stages):
            cutoff = None if best is None else -(-best_cost * batch // best.batch)
            plan, bound = _solve(problem, stages, batch, micro_batches, cutoff, deadline)
            if plan is not None:
                best, best_cost = plan, problem.evaluate(plan).cost
            if bound is not None:
                lower.append(Fraction(bound, batch))
    if best is not None:
        lower.append(Fraction(best_cost, best.batch))
    return JointResult(best, None if best is None else best_cost, min(lower, default=None), 0)


def _solve(
    problem: PipelineProblem, stages: int, batch: int, micro_batches: int, cutoff: int | None, deadline: float
) -> tuple[PipelinePlan | None, int | None]:
    """A plan below the cutoff, or none, and a bound on the others; None where there are no others."""
    from ortools.sat.python import cp_model

    if time.monotonic() >= deadline:
        return None, 0
    tables = problem.tables(stages, batch // micro_batches)
    of = tables.stage(0, problem.layers, 1, problem.memory_limit)
    strategies = range(of.cost.shape[1])
    if not of.allowed.any(axis=1).all():
        return None, None
    model = cp_model.CpModel()
    z: dict[tuple[int, int, int], Any] = {
        (layer, i, s): model.new_bool_var("")
        for layer, i, s in product(range(problem.layers), range(stages), strategies)
        if of.allowed[layer, s]
    }
    inside = {
        (layer, i): sum(z[layer, i, s] for s in strategies if of.allowed[layer, s])
        for layer, i in product(range(problem.layers), range(stages))
    }
    model.add(inside[0, 0] == 1)
    model.add(inside[problem.layers - 1, stages - 1] == 1)
    for layer in range(problem.layers):
        model.add_exactly_one(z[layer, i, s] for i, s in product(range(stages), strategies) if of.allowed[layer, s])
        for i in range(stages) if layer else ():
            model.add(inside[layer, i] <= inside[layer - 1, i] + (inside[layer - 1, i - 1] if i else 0))
    highest = int((of.repeated.max(axis=1) + of.transformation.max(axis=(1, 2))).sum())
    slowest = model.new_int_var(0, highest, "slowest")
    total: Any = (micro_batches - 1) * slowest
    for i in range(stages):
        held = problem.schedule.in_flight(stages, i, micro_batches)
        changes = _changes(model, z, of, i)

        def weighed(table: Any, layers: Any, i: int = i) -> Any:
            return sum(int(table[k, s]) * z[k, i, s] for k in layers for s in strategies if of.allowed[k, s])

        everything = range(problem.layers)
        total += weighed(of.cost, everything) + changes
        model.add(slowest >= weighed(of.repeated, everything) + changes)
        states = weighed(of.states, everything)
        for layer in everything:
            used = states + held * weighed(of.forward, range(layer + 1)) + weighed(of.backward, [layer])
            model.add(used <= problem.memory_limit)
    if cutoff is not None:
        model.add(total <= cutoff - 1)
    model.minimize(total)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.max_time_in_seconds = max(0.01, deadline - time.monotonic())
    status = solver.solve(model)
    if status == cp_model.INFEASIBLE:
        return None, None
    bound = int(np.ceil(solver.best_objective_bound - 0.5))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, max(0, bound)
    chosen = sorted(key for key, variable in z.items() if solver.boolean_value(variable))
    borders = (*(min(layer for layer, i, _ in chosen if i == stage) for stage in range(stages)), problem.layers)
    return PipelinePlan(batch, micro_batches, borders, tuple(s for *_, s in chosen)), bound


def _changes(model: Any, z: dict[tuple[int, int, int], Any], of: Any, i: int) -> Any:
    """Quanta of all changes of layouts inside a stage."""
    layouts = of.layouts.tolist()
    shown: list[list[tuple[int, Any]]] = [[] for _ in range(of.layers)]
    for (layer, stage, s), variable in z.items():
        if stage == i:
            shown[layer].append((layouts[s], variable))
    terms = []
    for layer in range(1, of.layers):
        for before, after in zip(*np.nonzero(of.transformation[layer]), strict=True):
            of_before = [each for c, each in shown[layer - 1] if c == before]
            of_after = [each for c, each in shown[layer] if c == after]
            if of_before and of_after:
                both = model.new_bool_var("")
                model.add(both >= sum(of_before) + sum(of_after) - 1)
                terms.append(int(of.transformation[layer, before, after]) * both)
    return sum(terms)
