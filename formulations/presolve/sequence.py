"""The reductions in order, until nothing becomes smaller."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from formulations.presolve.first_pass import REPLACES, FirstPass, sums_are_safe
from formulations.presolve.reductions import (
    arc_consistency,
    coefficient_tightening,
    dominated_strategies,
    fixed_nodes,
    free_nodes,
    maximal_times,
    oversized_strategies,
    separable_tables,
    tied_nodes,
)
from formulations.presolve.workspace.export import export
from formulations.presolve.workspace.lift import Lift
from formulations.presolve.workspace.state import Workspace
from formulations.presolve.workspace.tunables import DEEP_ENTRIES, DEEP_SHARING
from formulations.problem.strategy_problem import StrategyProblem

Reduction = Callable[[Workspace], bool]
"""Makes a workspace smaller without changing the optimum; returns whether it did."""

REDUCTIONS: dict[str, Reduction] = {
    "arc_consistency": arc_consistency.reduce,
    "tied_nodes": tied_nodes.reduce,
    "fixed_nodes": fixed_nodes.reduce,
    "separable_tables": separable_tables.reduce,
    "maximal_times": maximal_times.reduce,
    "oversized_strategies": oversized_strategies.reduce,
    "coefficient_tightening": coefficient_tightening.reduce,
    "free_nodes": free_nodes.reduce,
    "dominated_strategies": dominated_strategies.reduce,
}
"""Techniques: all reductions by name, the cheap ones first."""

_FIRST_PASS = True
"""Technique: the cheapest reductions in one compiled pass over the whole problem before all others."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large a problem is; ``times`` counts those of all resources at which something begins or ends."""

    nodes: int
    strategies: int
    factors: int
    entries: int
    usage_terms: int
    times: int

    @classmethod
    def of(cls, problem: StrategyProblem) -> Size:
        """Measure a problem."""
        terms = [term for _, term in problem.usage_terms() if term.start < term.end]
        events = {(term.resource, t) for term in terms for t in (term.start, term.end)}
        return cls(
            len(problem.nodes),
            sum(node.size for node in problem.nodes),
            len(problem.factors),
            sum(factor.cost.size for factor in problem.factors),
            len(terms),
            len(events),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Presolved:
    """A smaller problem with the same optimum.

    Parameters
    ----------
    problem
        The reduced problem; its times and resources' limits are its own.
    lift
        From its choices to those of the original problem.
    offset
        The objective of lifted choices is that of the reduced ones plus this, exactly.
    before, after
        Sizes of the original and the reduced problem.
    steps
        Reductions that made it smaller, in order.
    contradiction
        Why nothing is feasible, where that was noticed (``problem`` is then the original one); else empty.
    """

    problem: StrategyProblem
    lift: Lift
    offset: int
    before: Size
    after: Size
    steps: tuple[str, ...]
    contradiction: str


def presolve(
    problem: StrategyProblem, reductions: Sequence[str] = tuple(REDUCTIONS), deadline: float = math.inf
) -> Presolved:
    """Reduce a problem exactly: an optimum of the result, lifted, is an optimum of ``problem``.

    Parameters
    ----------
    problem
        A validated problem.
    reductions
        Names from :data:`REDUCTIONS`, in the order in which they are tried.
    deadline
        Of :func:`time.monotonic`; reductions end soon after it, wherever they are.
    """
    steps: list[str] = []
    work = (
        _first_pass(problem, steps, deadline) if _FIRST_PASS and REPLACES.issubset(reductions) else Workspace(problem)
    )
    work.deadline = deadline
    shrunk = True
    while shrunk and not work.contradiction and time.monotonic() <= deadline:
        shrunk = False
        for name in reductions:
            if work.contradiction or time.monotonic() > deadline:
                break
            if REDUCTIONS[name](work):
                steps.append(name)
                shrunk = True
    before = Size.of(problem)
    if work.contradiction or work.check_constant_usage():
        return Presolved(problem, Lift.identity(problem), 0, before, before, tuple(steps), work.contradiction)
    reduced, lift, offset = export(work, problem)
    return Presolved(reduced, lift, offset, before, Size.of(reduced), tuple(steps), "")


def is_deep(problem: StrategyProblem) -> bool:
    """Whether a problem is large, and its tables are mostly the same few arrays: that of a deep model.

    Reduced tables are no longer the same, which costs more memory and time than the few nodes that such problems lose
    are worth.
    """
    tables = [factor.cost for factor in problem.factors] + [term.amount for _, term in problem.usage_terms()]
    entries = sum(table.size for table in tables)
    distinct = sum(table.size for table in {id(table): table for table in tables}.values())
    return entries > DEEP_ENTRIES and DEEP_SHARING * distinct <= entries


def lean_presolve(problem: StrategyProblem, deadline: float = math.inf) -> Presolved:
    """Presolve a problem, unless it is deep: then it stays as it is."""
    if not is_deep(problem):
        return presolve(problem, deadline=deadline)
    size = Size.of(problem)
    return Presolved(problem, Lift.identity(problem), 0, size, size, (), "")


def _first_pass(problem: StrategyProblem, steps: list[str], deadline: float) -> Workspace:
    """Return the workspace that the first pass leaves, or the whole problem where it cannot work."""
    if time.monotonic() > deadline or not sums_are_safe(problem):
        return Workspace(problem)
    first = FirstPass(problem)
    if first.run(deadline):
        steps.append("first_pass")
    return first.workspace()
