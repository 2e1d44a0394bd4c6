"""Parts against the definition, the search against enumeration, and each solver of parts in a process of its own."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator

import numpy as np
import pytest
from support.problems.random_problems import random_problem, training_step_problem
from support.tiers import fuzz

from formulations.encodings.flat import FlatProblem, flatten, message_entries
from formulations.problem.checker import check, check_result
from formulations.problem.solution import Claim, Progress, SolveOptions, Status
from formulations.problem.strategy_problem import Factor, IntArray, Node, Resource, StrategyProblem, UsageTerm
from formulations.solvers import SolverPool, solve, solve_in_process
from formulations.solvers.improvement import large_neighbourhood as module
from formulations.solvers.improvement.neighbourhoods import (
    Neighbourhoods,
    breadth_first,
    components,
    prefix_within,
    strategy_slacks,
)
from formulations.solvers.improvement.subproblem import Part, cut_out
from formulations.solvers.local_search.incumbent_search import IncumbentSearch
from formulations.solvers.local_search.moves import usage_of
from formulations.solvers.protocol.exchange import EXCHANGE, Update
from formulations.solvers.protocol.registry import UnknownSolverError, find_solver

EXACT_IN_FLOAT = 2**52


def _costs_are_exact(problem: StrategyProblem) -> bool:
    tables = [table.cost for table in (*problem.nodes, *problem.factors)]
    return sum(max(abs(int(table.max())), abs(int(table.min()))) for table in tables) < EXACT_IN_FLOAT


def _feasible(seed: int) -> tuple[StrategyProblem, FlatProblem, IntArray] | None:
    """A problem whose float form is exact, with a feasible assignment that is not always the best."""
    problem = random_problem(seed)
    flat = flatten(problem)
    if flat.contradiction or max(flat.rows.quantum, default=1) > 1 or not _costs_are_exact(problem):
        return None
    rng = np.random.default_rng(seed)
    for _ in range(40):
        choices = np.array([rng.integers(size) for size in flat.graph.sizes], dtype=np.int64)
        if check(problem, flat.original_choices(choices)).ok:
            return problem, flat, choices
    return None


def _part_assignments(part: Part, free: int) -> Iterator[tuple[int, ...]]:
    ballast = (0,) * (len(part.problem.nodes) - free)
    for own in itertools.product(*(range(len(kept)) for kept in part.strategies)):
        yield (*own, *ballast)


@pytest.mark.slow
def test_a_part_is_the_problem_with_the_others_fixed() -> None:
    compared, refused = 0, 0
    for seed in range(400):
        known = _feasible(seed)
        if known is None:
            continue
        problem, flat, choices = known
        rng = np.random.default_rng(seed)
        count = int(rng.integers(1, len(choices) + 1))
        nodes = rng.permutation(len(choices))[:count].astype(np.int64)
        part = cut_out(flat, choices, usage_of(flat.graph, flat.usage, choices), nodes)
        part.problem.validate()
        here = check(problem, flat.original_choices(choices)).objective
        start = check(part.problem, part.start)
        assert start.ok, seed
        fitting: dict[tuple[int, ...], int] = {}
        for own in _part_assignments(part, count):
            report = check(part.problem, own)
            if report.ok:
                fitting[tuple(part.flat_choices(own).tolist())] = report.objective - start.objective
        expected: dict[tuple[int, ...], int] = {}
        for changed in itertools.product(*(range(flat.graph.sizes[i]) for i in nodes)):
            moved = choices.copy()
            moved[nodes] = changed
            report = check(problem, flat.original_choices(moved))
            if report.ok:
                expected[changed] = report.objective - here
            else:
                refused += 1
        assert fitting == expected, seed
        compared += len(expected)
    assert compared > 1000
    assert refused > 1000


def _two_paths() -> FlatProblem:
    """Nodes 0-1-2 and 3-4; node 5 has one strategy and neighbours in both."""
    two, one = np.arange(2, dtype=np.int64), np.zeros(1, dtype=np.int64)
    nodes = tuple(Node(f"n{i}", two, None, (UsageTerm(0, i, i + 1, two),)) for i in range(5))
    table = np.array([[0, 1], [1, 0]], dtype=np.int64)
    pairs = tuple(Factor(scope, table) for scope in ((0, 1), (1, 2), (3, 4)))
    links = tuple(Factor((i, 5), np.array([[0], [3]], dtype=np.int64)) for i in (2, 3))
    return flatten(StrategyProblem("paths", (*nodes, Node("n5", one)), pairs + links, (Resource("memory", 0),), 6))


def test_orders_of_nodes() -> None:
    graph = _two_paths().graph
    label = components(graph)
    assert label[0] == label[1] == label[2]
    assert label[3] == label[4]
    assert len({int(label[0]), int(label[3]), int(label[5])}) == 3
    seeds, priority = np.array([0], dtype=np.int64), np.arange(6, dtype=np.int64)
    assert breadth_first(graph, seeds, priority, 9).tolist() == [0, 1, 2, 5, 3, 4]
    assert breadth_first(graph, seeds, priority, 1).tolist() == [0, 1]
    order = np.array([0, 1, 2, 3, 4], dtype=np.int64)
    # Two strategies a node and four entries a factor: 2, 8, 14, 16, 22 columns.
    assert [prefix_within(graph, order, budget) for budget in (1, 2, 7, 8, 21, 22)] == [1, 1, 1, 2, 4, 5]


def test_neighbourhoods_keep_to_their_budget() -> None:
    problem = training_step_problem(1, operators=120, strategies=5, memory=0.4)
    flat = flatten(problem)
    choices = np.zeros(len(problem.nodes), dtype=np.int64)
    slack = np.random.default_rng(0).random(len(flat.unary))
    drawn = Neighbourhoods(flat, slack, np.random.default_rng(1))
    assert {"ball", "regret", "window"} <= set(drawn.kinds)
    for kind in drawn.kinds:
        nodes = drawn.draw(kind, choices, 400)
        assert 0 < len(nodes) < len(drawn.free)
        assert len(set(nodes.tolist())) == len(nodes)
        part = cut_out(flat, choices, np.zeros(len(flat.usage.limit)), nodes)
        columns = sum(node.size for node in part.problem.nodes) + sum(f.cost.size for f in part.problem.factors)
        assert columns <= 400
        assert columns > 40
        whole = int(flat.graph.sizes.sum() + flat.graph.table_size.sum())
        assert sorted(drawn.draw(kind, choices, whole).tolist()) == drawn.free.tolist()


def _stars(count: int, leaves: int) -> FlatProblem:
    """Separate stars; every node of star ``k`` uses time ``k`` only."""
    two, table = np.arange(2, dtype=np.int64), np.array([[0, 1], [1, 0]], dtype=np.int64)
    size = leaves + 1
    nodes = tuple(
        Node(f"n{k}.{i}", two, None, (UsageTerm(0, k, k + 1, two),)) for k in range(count) for i in range(size)
    )
    factors = tuple(Factor((k * size, k * size + i), table) for k in range(count) for i in range(1, size))
    return flatten(StrategyProblem("stars", nodes, factors, (Resource("memory", 3),), count))


@pytest.mark.parametrize("kind", ["hub", "window"])
def test_kinds_take_what_belongs_together(kind: str) -> None:
    count, leaves = 5, 20
    flat = _stars(count, leaves)
    columns_of_a_star = 2 * (leaves + 1) + 4 * leaves
    drawn = Neighbourhoods(flat, np.zeros(len(flat.unary)), np.random.default_rng(0))
    choices = np.zeros(count * (leaves + 1), dtype=np.int64)
    seen = set()
    for _ in range(30):
        nodes = drawn.draw(kind, choices, columns_of_a_star)
        stars = set((nodes // (leaves + 1)).tolist())
        assert len(nodes) == leaves + 1
        assert len(stars) == 1
        seen |= stars
        assert len(drawn.draw(kind, choices, count * columns_of_a_star)) == len(drawn.free)
    assert len(seen) == count


def test_regret_goes_where_the_present_strategies_are_poor() -> None:
    flat = _stars(6, 20)
    slack = np.zeros(len(flat.unary))
    slack[2 * 63] = 5.0
    drawn = Neighbourhoods(flat, slack, np.random.default_rng(0))
    choices = np.zeros(6 * 21, dtype=np.int64)
    assert all(63 in drawn.draw("regret", choices, 30) for _ in range(20))


def test_slacks_are_lower_bounds_on_what_a_strategy_costs() -> None:
    rng = np.random.default_rng(0)
    compared = 0
    for seed in range(150):
        problem = random_problem(seed, "tiny")
        flat = flatten(problem)
        if flat.contradiction or not _costs_are_exact(problem):
            continue
        graph = flat.graph
        messages = 100 * rng.standard_normal(message_entries(graph))
        slack = strategy_slacks(graph, flat.unary, flat.tables, messages)
        unary = flat.unary.copy()
        bound = 0.0
        tables = [
            flat.tables[s : s + z].reshape(graph.sizes[graph.scope[f, : graph.arity[f]]])
            for f, (s, z) in enumerate(zip(graph.table_start, graph.table_size, strict=True))
        ]
        for f, table in enumerate(tables):
            rest = table
            for k in range(graph.arity[f]):
                i, start = graph.scope[f, k], graph.message_start[f, k]
                message = messages[start : start + graph.sizes[i]]
                unary[graph.offset[i] : graph.offset[i + 1]] += message
                rest = rest - message.reshape([-1 if axis == k else 1 for axis in range(graph.arity[f])])
            bound += rest.min()
        bound += np.minimum.reduceat(unary, graph.offset[:-1]).sum()
        assert (slack >= -1e-6).all()
        for choices in itertools.product(*(range(size) for size in graph.sizes)):
            cost = sum(flat.unary[graph.offset[i] + s] for i, s in enumerate(choices))
            cost += sum(
                table[tuple(choices[i] for i in graph.scope[f, : graph.arity[f]])] for f, table in enumerate(tables)
            )
            highest = max(slack[graph.offset[i] + s] for i, s in enumerate(choices))
            assert bound + highest <= cost + 1e-6 * max(1.0, abs(cost)), seed
            compared += 1
    assert compared > 1000


def _solve(
    problem: StrategyProblem, options: SolveOptions, part_solver: str = "brute_force"
) -> tuple[Claim, list[int]]:
    """Solve in this process; check all that is reported."""
    found: list[tuple[int, ...]] = []
    told: list[Progress] = []
    claim = module.solve(problem, options, told.append, found.append, part_solver=part_solver)
    reports = [check(problem, choices) for choices in found]
    assert all(report.ok for report in reports)
    objectives = [report.objective for report in reports if report.objective is not None]
    assert objectives == sorted(objectives, reverse=True)
    assert {progress.source for progress in told} <= {"large_neighbourhood"}
    if claim.choices is not None:
        assert found[-1] == claim.choices
    return claim, objectives


@pytest.mark.parametrize("batch", range(4))
def test_small_problems_are_solved_as_a_whole(batch: int) -> None:
    proved = 0
    for seed in range(100 * batch, 100 * (batch + 1)):
        problem = random_problem(seed)
        optimum = solve_in_process(problem, "brute_force").objective
        claim, _ = _solve(problem, SolveOptions(time_limit=30.0, iteration_limit=4))
        if optimum is None:
            assert claim.choices is None, seed
            continue
        assert not claim.proved_infeasible, seed
        assert claim.bound is None or claim.bound <= optimum, seed
        if claim.choices is not None:
            # A whole problem is enumerated: whatever was found at first, this is the optimum and proved.
            assert check(problem, claim.choices).objective == claim.bound == optimum, seed
            proved += 1
    assert proved > 50


def _from_smallest(
    seed: int, part_solver: str, iterations: int, found: list[int]
) -> tuple[StrategyProblem, module.PartSearch]:
    """A search over parts, run without prices from the assignment that needs least memory."""
    problem = training_step_problem(seed, operators=24, strategies=3, memory=0.5, factor_usage=False)
    flat = flatten(problem)
    search = IncumbentSearch(problem, flat, lambda _, objective: found.append(objective))
    start = flat.flat_choices(tuple(int(np.argmin(node.usage[0].amount)) for node in problem.nodes))
    assert start is not None
    assert search.offer(start)
    none = np.zeros(len(flat.usage.limit)), np.zeros(message_entries(flat.graph))
    options = SolveOptions(time_limit=60.0, seed=seed, iteration_limit=iterations)
    parts = module.PartSearch(problem, flat, search, *none, part_solver, options, first_columns=60)
    parts.run(time.monotonic() + options.time_limit)
    return problem, parts


def test_parts_of_a_few_nodes_come_close_to_the_optimum_and_prove_nothing() -> None:
    for seed in range(6):
        found: list[int] = []
        problem, parts = _from_smallest(seed, "brute_force", 60, found)
        assert parts.bound is None
        assert parts.rounds == 60
        assert found == sorted(found, reverse=True)
        best = parts.search.best
        assert best is not None
        report = check(problem, parts.flat.original_choices(best))
        assert report.ok
        assert report.objective == found[-1]
        bound = solve_in_process(problem, "lagrangian", SolveOptions(iteration_limit=60)).bound
        assert bound is not None
        assert bound <= found[-1] <= 1.05 * bound
        assert found[0] > 1.05 * bound


def test_deterministic() -> None:
    for seed in (1, 2):
        problem = training_step_problem(seed, operators=40, strategies=4, memory=0.3)
        options = SolveOptions(time_limit=120.0, seed=seed, iteration_limit=6)
        assert _solve(problem, options, "lagrangian") == _solve(problem, options, "lagrangian")


def test_what_another_solver_found_is_taken_over() -> None:
    problem = training_step_problem(3, operators=24, strategies=3, memory=0.5)
    known = solve_in_process(problem, "lagrangian", SolveOptions(iteration_limit=200)).choices
    assert known is not None
    objective = check(problem, known).objective
    EXCHANGE.publish(Update(choices=known))
    with EXCHANGE.subscribed_to(problem):
        claim, _ = _solve(problem, SolveOptions(time_limit=60.0, iteration_limit=1), "lagrangian")
    assert claim.choices is not None
    assert check(problem, claim.choices).objective <= objective


def test_the_solver_of_a_part_does_not_hear_of_the_whole() -> None:
    """What another solver finds meanwhile has too many nodes for a part; it becomes the incumbent instead."""
    problem, parts = _from_smallest(0, "brute_force", 4, [])
    known = solve_in_process(problem, "lagrangian", SolveOptions(iteration_limit=200)).choices
    assert known is not None
    asked = []

    def told_of_the_whole(part: StrategyProblem, options: SolveOptions, *_: object) -> Claim:
        EXCHANGE.publish(Update(choices=known, bound=0))
        asked.append((EXCHANGE.take(part), EXCHANGE.bound(part)))
        return Claim(None, None)

    parts._solver = told_of_the_whole
    parts.rounds = 0
    with EXCHANGE.subscribed_to(problem):
        parts.run(time.monotonic() + 60.0)
    EXCHANGE.empty()
    assert asked == [(None, None)] * len(asked)
    assert asked
    assert parts.search.objective is not None
    assert parts.search.objective <= (check(problem, known).objective or 0)


@pytest.mark.parametrize("name", ["large_neighbourhood", "large_neighbourhood:cpsat"])
def test_branch_and_cut_and_constraint_programming_solve_parts(name: str, pool: SolverPool) -> None:
    for seed in range(8):
        problem = random_problem(seed)
        optimum = solve_in_process(problem, "brute_force").objective
        result = solve(problem, name, SolveOptions(time_limit=20.0, iteration_limit=4), pool=pool)
        assert check_result(problem, result).ok
        assert result.choices is None or optimum is not None
        if result.objective is not None and _costs_are_exact(problem):
            assert result.objective == optimum, seed
            assert result.status is Status.OPTIMAL, seed


@pytest.mark.parametrize("name", ["large_neighbourhood", fuzz("large_neighbourhood:cpsat")])
def test_parts_of_a_training_step_improve_it(name: str, pool: SolverPool) -> None:
    problem = training_step_problem(4, operators=60, strategies=5, memory=0.3)
    start = tuple(int(np.argmin(node.usage[0].amount)) for node in problem.nodes)
    before = check(problem, start)
    options = SolveOptions(time_limit=20.0, iteration_limit=5, initial_choices=start if before.ok else None)
    result = solve(problem, name, options, pool=pool)
    assert check_result(problem, result).ok
    assert result.objective is not None
    assert before.objective is not None
    assert result.objective < before.objective


def test_names() -> None:
    assert find_solver("large_neighbourhood").needs_own_process
    assert find_solver("large_neighbourhood:cpsat").needs_own_process
    assert not find_solver("large_neighbourhood:lagrangian").needs_own_process
    with pytest.raises(UnknownSolverError, match="nonsense"):
        find_solver("large_neighbourhood:nonsense")
