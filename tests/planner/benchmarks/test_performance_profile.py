from __future__ import annotations

from math import inf

import matplotlib as mpl
import pytest

from formulations.problem.solution import Status
from planner.benchmarks import BenchRow
from planner.benchmarks.performance_profile import SHORTEST_SECONDS, gap_over_time, profiles, ratios_to_fastest
from planner.benchmarks.rows import Moment
from planner.plots import performance_profile, time_ratios

mpl.use("agg")

MOMENTS = (Moment(1.0, 200, None, "x"), Moment(2.0, 200, 100, "x"), Moment(4.0, 100, 100, "x"))


def row(instance: str, solver: str, status: Status, history: tuple[Moment, ...], seconds: float = 5.0) -> BenchRow:
    last = history[-1] if history else Moment(0.0, None, None, "")
    return BenchRow(
        instance, "random", solver, status, last.objective, last.bound, None, seconds, 0.0, 1, 0.0, 1, 9.0, 0, None,
        "", "", history,
    )  # fmt: skip


ROWS = [
    row("a", "x", Status.OPTIMAL, MOMENTS),
    row("b", "x", Status.INFEASIBLE, ()),
    row("a", "y", Status.FEASIBLE, (Moment(3.0, 100, -400, "y"),)),
]


def test_a_gap_is_one_until_both_ends_are_known_and_at_most_one() -> None:
    assert gap_over_time(ROWS[0]) == [(0.0, 1.0), (1.0, 1.0), (2.0, 0.5), (4.0, 0.0)]
    assert gap_over_time(ROWS[1]) == [(0.0, 1.0), (5.0, 0.0)]
    assert gap_over_time(ROWS[2]) == [(0.0, 1.0), (3.0, 1.0)]


def test_a_profile_is_over_all_instances_whoever_ran_on_them() -> None:
    first, second = profiles(ROWS, target=0.5)
    assert list(first.seconds) == list(second.seconds) == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
    assert list(first.mean_gap) == [1.0, 1.0, 0.75, 0.75, 0.5, 0.0]
    assert list(first.share_within) == [0.0, 0.0, 0.5, 0.5, 0.5, 1.0]
    assert set(second.mean_gap) == {1.0}
    assert set(second.share_within) == {0.0}


def test_the_figure_draws_what_the_profiles_say() -> None:
    left, right = performance_profile(ROWS, target_gap=0.5).axes
    expected = profiles(ROWS, target=0.5)
    for axes, name in (left, "mean_gap"), (right, "share_within"):
        drawn = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
        assert drawn == {profile.solver: list(100 * getattr(profile, name)) for profile in expected}
        assert axes.get_xlabel() == "time (s)"
        assert "(%)" in axes.get_ylabel()
    assert [text.get_text() for text in right.get_legend().get_texts()] == ["x", "y"]
    assert "2 instances" in left.get_title()
    assert performance_profile(ROWS[:1]).axes[0].get_title() == "a"


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(ValueError, match="no rows"):
        performance_profile([])


def test_ratios_are_to_the_fastest_solver_of_each_instance() -> None:
    fast = row("a", "z", Status.OPTIMAL, (Moment(0.5, 100, 100, "z"),))
    at_once = row("c", "x", Status.OPTIMAL, (Moment(0.0, 100, 100, "x"),))
    rows = [*ROWS, fast, at_once, row("c", "z", Status.OPTIMAL, (Moment(2 * SHORTEST_SECONDS, 100, 100, "z"),))]
    found = {solver: list(ratios) for solver, ratios in ratios_to_fastest(rows, target=0.0).items()}
    assert found == {"x": [8.0, 1.0, 1.0], "y": [inf, inf, inf], "z": [1.0, inf, 2.0]}
    (axes,) = time_ratios(rows, target_gap=0.0).axes
    lines = {line.get_label(): [tuple(point) for point in line.get_xydata()] for line in axes.get_lines()}
    assert lines["x"][:-1] == [(1.0, 0.0), (1.0, pytest.approx(100 / 3)), (1.0, pytest.approx(200 / 3)), (8.0, 100.0)]
    assert {share for _, share in lines["y"]} == {0.0}
    assert "multiple" in axes.get_xlabel()
    assert "(%)" in axes.get_ylabel()


def test_ratios_where_nothing_is_solved_are_refused() -> None:
    with pytest.raises(ValueError, match="larger target_gap"):
        time_ratios(ROWS[2:])
