"""Random problems for tests: those of the package, and the same problem written down in another way."""

from __future__ import annotations

import numpy as np

from formulations.instances.random_problems import random_problem, training_step_problem, with_limits
from formulations.problem.strategy_problem import Factor, Node, StrategyProblem, UsageTerm

__all__ = ["random_problem", "relabelled", "scaled", "training_step_problem", "with_limits"]


def scaled(problem: StrategyProblem, cost_factor: int, amount_factor: int) -> StrategyProblem:
    """Return the problem with all costs, and all amounts and limits, multiplied."""

    def terms(usage: tuple[UsageTerm, ...]) -> tuple[UsageTerm, ...]:
        return tuple(UsageTerm(t.resource, t.start, t.end, t.amount * amount_factor) for t in usage)

    nodes = tuple(Node(n.name, n.cost * cost_factor, n.forbidden, terms(n.usage)) for n in problem.nodes)
    factors = tuple(Factor(f.scope, f.cost * cost_factor, f.forbidden, terms(f.usage)) for f in problem.factors)
    limits = [None if r.limit is None else r.limit * amount_factor for r in problem.resources]
    return with_limits(StrategyProblem(problem.name, nodes, factors, problem.resources, problem.horizon), limits)


def relabelled(problem: StrategyProblem, seed: int) -> StrategyProblem:
    """Return the same problem with nodes, strategies, factors and the axes of factors shuffled."""
    rng = np.random.default_rng(seed)
    order = rng.permutation(len(problem.nodes))
    place = {int(old): new for new, old in enumerate(order)}
    labels = [rng.permutation(node.size) for node in problem.nodes]

    def nodes() -> tuple[Node, ...]:
        result = []
        for old in order:
            node, p = problem.nodes[old], labels[old]
            flags = None if node.forbidden is None else node.forbidden[p]
            usage = tuple(UsageTerm(t.resource, t.start, t.end, t.amount[p]) for t in node.usage)
            result.append(Node(node.name, node.cost[p], flags, usage))
        return tuple(result)

    factors = []
    for j in rng.permutation(len(problem.factors)):
        factor = problem.factors[j]
        grid = np.ix_(*(labels[i] for i in factor.scope))
        axes = tuple(int(a) for a in rng.permutation(len(factor.scope)))
        flags = None if factor.forbidden is None else factor.forbidden[grid].transpose(axes)
        usage = tuple(UsageTerm(t.resource, t.start, t.end, t.amount[grid].transpose(axes)) for t in factor.usage)
        scope = tuple(place[factor.scope[a]] for a in axes)
        factors.append(Factor(scope, factor.cost[grid].transpose(axes), flags, usage))
    return StrategyProblem(problem.name, nodes(), tuple(factors), problem.resources, problem.horizon)
