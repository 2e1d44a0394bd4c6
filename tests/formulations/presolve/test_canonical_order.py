"""Equal components whose nodes are numbered differently: recognised, shared, and reduced exactly."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from support.problems.random_problems import with_limits

from formulations.presolve import REDUCTIONS, presolve
from formulations.presolve.reductions import component_states
from formulations.presolve.reductions.component_states import pareto_front
from formulations.presolve.workspace.canonical_order import canonical_order
from formulations.presolve.workspace.component_parts import Part, components
from formulations.presolve.workspace.state import Workspace
from formulations.problem.checker import check, usage_profile
from formulations.problem.solution import SolveOptions
from formulations.problem.strategy_problem import Factor, IntArray, Node, Resource, StrategyProblem, UsageTerm
from formulations.solvers.exact import brute_force

OWN = ("component_fronts",)
PROBLEMS = 300


def template(rng: np.random.Generator) -> tuple[list[Node], list[Factor]]:
    """A connected graph of two to five nodes; every fourth has symmetries, as costs are the same everywhere."""
    count = int(rng.integers(2, 6))
    most = 1 if rng.random() < 0.25 else int(rng.choice([4, 50]))
    sizes = [2 if most == 1 or rng.random() < 0.7 else 3 for _ in range(count)]

    def numbers(shape: tuple[int, ...]) -> IntArray:
        if most == 1:
            return np.indices(shape).sum(axis=0) % 2
        return rng.integers(0, most, shape, dtype=np.int64, endpoint=True)

    windows = [(0, 2), (1, 3)]

    def usage(shape: tuple[int, ...]) -> tuple[UsageTerm, ...]:
        own = [windows[0]] if most == 1 else [w for w in windows if rng.random() < 0.7]
        return tuple(UsageTerm(0, *window, numbers(shape)) for window in own)

    nodes = [Node("", numbers((size,)), None, usage((size,))) for size in sizes]
    cycle = count > 2 and rng.random() < 0.4
    scopes: list[tuple[int, ...]] = [(i, (i + 1) % count) for i in range(count if cycle else count - 1)]
    if count > 2 and rng.random() < 0.4:
        scopes.append((0, 1, 2))
    factors = []
    for scope in scopes:
        shape = tuple(sizes[i] for i in scope)
        forbidden = rng.random(shape) < 0.2 if most > 1 and rng.random() < 0.3 else None
        factors.append(Factor(scope, numbers(shape), forbidden, usage(shape) if rng.random() < 0.3 else ()))
    return nodes, factors


def renumbered(
    rng: np.random.Generator, nodes: list[Node], factors: list[Factor], first: int, later: int
) -> tuple[list[Node], list[Factor]]:
    """The same graph in another order of nodes and axes, as nodes ``first`` and on, ``later`` times later."""

    def moved(usage: tuple[UsageTerm, ...], axes: list[int]) -> tuple[UsageTerm, ...]:
        return tuple(UsageTerm(t.resource, t.start + later, t.end + later, t.amount.transpose(axes)) for t in usage)

    order = rng.permutation(len(nodes))
    place = np.argsort(order)
    own = [nodes[k] for k in order]
    tables = []
    for j in rng.permutation(len(factors)):
        factor = factors[j]
        axes = [int(a) for a in rng.permutation(len(factor.scope))]
        forbidden = None if factor.forbidden is None else factor.forbidden.transpose(axes)
        scope = tuple(first + int(place[factor.scope[a]]) for a in axes)
        tables.append(Factor(scope, factor.cost.transpose(axes), forbidden, moved(factor.usage, axes)))
    return [Node(f"n{first + k}", n.cost, None, moved(n.usage, [0])) for k, n in enumerate(own)], tables


def copies(seed: int, count: int, apart: int = 0) -> StrategyProblem:
    """Copies of one random component, each numbered anew, ``apart`` times after one another."""
    rng = np.random.default_rng(seed)
    graph = template(rng)
    nodes: list[Node] = []
    factors: list[Factor] = []
    for k in range(count):
        own, tables = renumbered(rng, *graph, len(nodes), k * apart)
        nodes += own
        factors += tables
    free = (Resource("device", None),)
    problem = StrategyProblem(f"copies-{seed}", tuple(nodes), tuple(factors), free, 3 + (count - 1) * apart)
    peaks = [
        int(usage_profile(problem, [int(rng.integers(node.size)) for node in nodes])[0].max(initial=0))
        for _ in range(4)
    ]
    problem = with_limits(problem, [int(rng.choice([min(peaks), sorted(peaks)[1], max(0, min(peaks) - 1)]))])
    problem.validate()
    return problem


def optimum(problem: StrategyProblem) -> tuple[int, tuple[int, ...]] | None:
    if not problem.nodes:
        return 0, ()
    claim = brute_force.solve(problem, SolveOptions(), lambda _: None, lambda _: None)
    return None if claim.choices is None or claim.bound is None else (claim.bound, claim.choices)


@pytest.mark.parametrize("reductions", [OWN, tuple(REDUCTIONS)], ids=["fronts", "all"])
@pytest.mark.parametrize("apart", [0, 1, 3])
def test_renumbered_copies_reduce_to_the_same_optimum(apart: int, reductions: tuple[str, ...]) -> None:
    feasible = 0
    for seed in range(PROBLEMS):
        problem = copies(seed, 2, apart)
        expected = optimum(problem)
        result = presolve(problem, reductions)
        best = None if result.contradiction else optimum(result.problem)
        assert (best is None) == (expected is None), seed
        if best is not None and expected is not None:
            assert best[0] + result.offset == expected[0], seed
            report = check(problem, result.lift(best[1]), expected[0])
            assert report.ok, (seed, report.violations)
            feasible += 1
    assert PROBLEMS / 4 < feasible < PROBLEMS


def test_renumbered_copies_are_the_same_part() -> None:
    compared = 0
    for seed in range(600):
        work = Workspace(copies(seed, 4, 2))
        if work.contradiction:
            continue
        parts = [Part.of(work, component) for component in components(work)]
        assert len({part.digest() for part in parts}) == 1, seed
        compared += len(parts[0].nodes) > 1
    assert compared > 400


def test_equal_digests_mean_equal_arrays() -> None:
    """All components of many problems: those with one digest agree in everything a front is computed from."""
    known: dict[bytes, Part] = {}
    shared = 0
    for seed in range(400):
        work = Workspace(copies(seed, 2, 1))
        for component in components(work):
            part = Part.of(work, component)
            other = known.setdefault(part.digest(), part)
            shared += other is not part
            for mine, theirs in zip((*part.cost, *part.amounts), (*other.cost, *other.amounts), strict=True):
                np.testing.assert_array_equal(mine, theirs)
            for own, its in zip(part.couplings, other.couplings, strict=True):
                assert own.scope == its.scope
                np.testing.assert_array_equal(own.cost, its.cost)
                np.testing.assert_array_equal(own.amounts, its.amounts)
                assert (own.forbidden is None) == (its.forbidden is None)
                if own.forbidden is not None:
                    np.testing.assert_array_equal(own.forbidden, its.forbidden)
    assert shared > 300


def test_a_part_keeps_each_node_with_its_tables() -> None:
    """Whatever the order, the part's cost of a joint choice is the problem's."""
    rng = np.random.default_rng(0)
    for seed in range(200):
        problem = with_limits(copies(seed, 1), [1 << 40])
        work = Workspace(problem)
        part = Part.of(work, list(work.living()))
        choice = [int(rng.integers(len(work.strategies[i]))) for i in part.nodes]
        if any(c.forbidden is not None and c.forbidden[tuple(choice[k] for k in c.scope)] for c in part.couplings):
            continue
        original = [0] * len(problem.nodes)
        for i, s in zip(part.nodes, choice, strict=True):
            original[i] = int(work.strategies[i][s])
        cost = sum(int(own[s]) for own, s in zip(part.cost, choice, strict=True)) + part.least_cost
        cost += sum(int(c.cost[tuple(choice[k] for k in c.scope)]) for c in part.couplings)
        assert check(problem, original).objective == cost + work.offset, seed


def test_renumbered_copies_share_one_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(component_states, "pareto_front", lambda *args: calls.append(args) or pareto_front(*args))
    for seed in range(40):
        calls.clear()
        presolve(with_limits(copies(seed, 20, 1), [1 << 40]), OWN)
        assert len(calls) <= 1, seed


def test_one_different_entry_keeps_parts_apart() -> None:
    nodes, factors = template(np.random.default_rng(3))
    seen = set()
    for changed in range(factors[0].cost.size + 1):
        cost = factors[0].cost.copy()
        if changed:
            cost.flat[changed - 1] += 60
        own, tables = renumbered(
            np.random.default_rng(changed), nodes, [Factor(factors[0].scope, cost), *factors[1:]], 0, 0
        )
        problem = StrategyProblem("one", tuple(own), tuple(tables), (Resource("device", 1 << 40),), 3)
        work = Workspace(problem)
        seen.add(Part.of(work, list(work.living())).digest())
    assert len(seen) == factors[0].cost.size + 1


def test_order_of_every_graph_of_four_nodes_is_canonical() -> None:
    """All 64 graphs of four equal nodes in all 24 numberings: refinement with one trial is enough for these."""
    pairs = list(itertools.combinations(range(4), 2))
    for flags in itertools.product((False, True), repeat=len(pairs)):
        edges = [pair for pair, there in zip(pairs, flags, strict=True) if there]
        forms = set()
        for numbering in itertools.permutations(range(4)):
            own = {frozenset((numbering[a], numbering[b])) for a, b in edges}
            views = [[(b"edge", (b,)) for b in range(4) if frozenset((a, b)) in own] for a in range(4)]
            order = canonical_order([b""] * 4, views)
            assert sorted(order) == [0, 1, 2, 3]
            forms.add(tuple(frozenset((order[a], order[b])) in own for a, b in pairs))
        assert len(forms) == 1, edges
