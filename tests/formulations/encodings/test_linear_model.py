"""The linear model says what the problem says, and Pyomo's copy of it is the same matrix."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from support.problems.random_problems import random_problem, training_step_problem

from formulations.encodings.linear_model import LinearModel, build_linear_model
from formulations.problem.checker import ViolationKind, check, usage_profile
from formulations.problem.strategy_problem import Factor, Node, ProblemError, Resource, StrategyProblem, UsageTerm
from formulations.solvers.exact.highs_session import CostScale
from formulations.solvers.reference.pyomo_mirror import build_pyomo_model, export_model


def structural_matrix(model: LinearModel) -> np.ndarray:
    dense = np.zeros((len(model.row_rhs), model.columns))
    for row, (first, last) in enumerate(itertools.pairwise(model.row_start.tolist())):
        np.add.at(dense[row], model.row_column[first:last], model.row_value[first:last])
    return dense


@pytest.mark.parametrize("seed", range(150))
def test_every_assignment_means_the_same(seed: int) -> None:
    problem = random_problem(seed, "tiny")
    model = build_linear_model(problem)
    matrix = structural_matrix(model)
    for choices in itertools.product(*(range(node.size) for node in problem.nodes)):
        report = check(problem, choices)
        values = model.column_values(choices)
        if values is None:
            assert report.violations, choices
            continue
        assert not report.kinds() & {ViolationKind.FORBIDDEN_NODE, ViolationKind.FORBIDDEN_FACTOR}
        assert (matrix @ values == model.row_rhs).all()
        assert model.choices(values) == choices
        assert model.objective(choices) == report.objective
        cost = model.constant + sum(int(c) for c in model.cost[values == 1])
        shift = model.cost_shift
        assert cost << shift <= report.objective
        assert shift or cost == report.objective
        local = model.local_choice(choices)
        profiles = usage_profile(problem, choices)
        for table in model.usage:
            profile = table.profile(local)
            assert profile.tolist() == profiles[table.resource].tolist()
            assert (table.least_profile() <= profile).all()
            np.testing.assert_allclose(
                table.expected_profile(values), profile.astype(float), rtol=1e-9, atol=1e-12 * float(profile.max())
            )
            over = False
            for t in table.maximal_times(model.allowed).tolist():
                row = table.row(t, model.allowed)
                used = row.base + sum(int(v) for v in row.values[values[row.columns] == 1])
                assert used << row.shift <= profile[t]
                assert row.shift or used == profile[t]
                over |= used > row.limit
                scaled = row.scaled()
                fits = scaled.coefficients @ values[scaled.columns] <= scaled.upper + 1e-12
                assert (used <= row.limit) == (fits and not values[scaled.impossible].any())
            exceeded = (profile > table.limit).any()
            assert not over or exceeded
            if table.limit < 2**50:
                assert over == exceeded
            if exceeded:
                worst = int(np.argmax(profile))
                cover = table.cover(worst, local)
                assert values[cover].all()


def test_forbidden_assignments_have_no_columns() -> None:
    problem = StrategyProblem(
        "p",
        (Node("a", np.array([1, 2]), np.array([False, True])), Node("b", np.array([1, 2]))),
        (Factor((1, 0), np.array([[0, 0], [5, 5]]), np.array([[True, False], [False, False]])),),
        (),
        1,
    )
    model = build_linear_model(problem)
    assert [model.local_choice(c) is None for c in itertools.product((0, 1), (0, 1))] == [True, False, True, True]


def test_resharding_is_not_free() -> None:
    """With ``<=`` for ``=`` in the marginals, all entries of a factor could be zero."""
    problem = StrategyProblem(
        "p",
        (Node("a", np.array([0, 0])), Node("b", np.array([0, 0]))),
        (Factor((0, 1), np.array([[5, 9], [9, 6]])),),
        (),
        1,
    )
    model = build_linear_model(problem)
    values = model.column_values((0, 0))
    values[model.one_hot_columns :] = 0
    assert (structural_matrix(model) @ values != model.row_rhs).sum() == 2


def test_what_needs_no_factor_columns_gets_none() -> None:
    rng = np.random.default_rng(0)
    separable = rng.integers(0, 9, (3, 1, 1)) + rng.integers(0, 9, (1, 4, 1)) + rng.integers(0, 9, (1, 1, 2))
    nodes = tuple(Node(f"n{i}", rng.integers(0, 9, size)) for i, size in enumerate((3, 4, 2)))
    idle = UsageTerm(0, 2, 2, np.ones((3, 4), dtype=np.int64))
    unlimited = UsageTerm(1, 0, 2, np.ones((3, 4), dtype=np.int64))
    factors = (
        Factor((0, 1, 2), separable),
        Factor((0, 1), np.full((3, 4), 7), None, (idle, unlimited)),
        Factor((2,), np.array([4, 5])),
    )
    problem = StrategyProblem("p", nodes, factors, (Resource("r", 5), Resource("s", None)), 2)
    model = build_linear_model(problem)
    assert model.columns == 9
    for choices in itertools.product(range(3), range(4), range(2)):
        total = model.constant + int(model.cost @ model.column_values(choices).astype(np.int64))
        assert total == check(problem, choices).objective


def test_parallel_factors_in_both_orientations_share_columns() -> None:
    table = np.arange(6, dtype=np.int64).reshape(2, 3) ** 2
    nodes = (Node("a", np.array([0, 0])), Node("b", np.array([0, 0, 0])))
    model = build_linear_model(StrategyProblem("p", nodes, (Factor((0, 1), table), Factor((1, 0), table.T)), (), 1))
    assert len(model.factors) == 1
    assert model.columns == 5 + 6


def test_few_rows_matter() -> None:
    problem = training_step_problem(1, operators=200, strategies=4, memory=0.5)
    model = build_linear_model(problem)
    (table,) = model.usage
    assert 0 < len(table.maximal_times(model.allowed)) < problem.horizon


@pytest.mark.parametrize("largest", [5, 10**6, 10**10, 10**15])
def test_scaled_costs_are_exact(largest: int) -> None:
    cost = np.array([0, 3 * largest, 6 * largest, 12 * largest])
    scale = CostScale.of(cost)
    assert scale.divisor == 3 * largest
    odd = np.array([0, 1, largest, largest - 1])
    scale = CostScale.of(odd)
    scaled = scale.apply(odd)
    assert scaled.max() <= 2**20
    assert [scale.round_up(s) for s in scaled.tolist()] == odd.tolist()
    assert scale.round_up(scaled[2] - 0.25 * 2.0**-scale.exponent) == largest


@pytest.mark.parametrize("seed", range(60))
def test_pyomo_has_the_same_matrix(seed: int) -> None:
    import pyomo.environ as pyo
    from pyomo.repn import generate_standard_repn

    linear = build_linear_model(random_problem(seed))
    pyomo_model = build_pyomo_model(linear)
    variables = [*pyomo_model.x.values(), *pyomo_model.e.values()]
    columns = {id(v): k for k, v in enumerate(variables)}

    def read(expression: object) -> tuple[np.ndarray, float]:
        repn = generate_standard_repn(expression)
        assert repn.is_linear()
        dense = np.zeros(linear.columns)
        dense[[columns[id(v)] for v in repn.linear_vars]] = repn.linear_coefs
        return dense, repn.constant

    rows = {
        constraint.name: (*read(constraint.body), constraint.upper)
        for constraint in pyomo_model.component_data_objects(pyo.Constraint)
    }
    cost, constant = read(pyomo_model.total_cost.expr)
    unit = 1 << linear.cost_shift
    np.testing.assert_array_equal(cost, linear.cost.astype(float) * unit)
    assert constant == linear.constant * unit
    structure = structural_matrix(linear)
    names = [f"one_strategy[{i}]" for i in range(len(linear.problem.nodes))] + [
        f"marginal[{f},{k},{s}]"
        for f, factor in enumerate(linear.factors)
        for k, i in enumerate(factor.scope)
        for s in range(linear.problem.nodes[i].size)
    ]
    for name, dense, rhs in zip(names, structure, linear.row_rhs, strict=True):
        if dense.any():
            np.testing.assert_array_equal(rows[name][0], dense)
            assert rows[name][2] - rows[name][1] == rhs
    for table in linear.usage:
        for t in table.maximal_times(linear.allowed).tolist():
            scaled = table.row(t, linear.allowed).scaled()
            for column in scaled.impossible.tolist():
                assert variables[column].ub == 0
            if len(scaled.columns):
                dense, _, rhs = rows[f"usage[{table.resource},{t}]"]
                np.testing.assert_array_equal(dense[scaled.columns], scaled.coefficients)
                assert np.count_nonzero(dense) == len(scaled.columns)
                assert rhs == scaled.upper


@pytest.mark.parametrize("suffix", [".lp", ".mps"])
def test_exported_models_can_be_read_by_others(suffix: str, tmp_path: Path) -> None:
    problem = random_problem(3)
    path = tmp_path / f"model{suffix}"
    export_model(problem, path)
    text = path.read_text()
    assert "one_strategy" in text
    assert "marginal" in text
    assert list(tmp_path.iterdir()) == [path]


def test_only_known_formats_are_exported(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match=r"model\.txt: use a path that ends in \.lp or \.mps"):
        export_model(random_problem(3), tmp_path / "model.txt")
