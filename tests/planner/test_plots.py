from __future__ import annotations

from collections import Counter

import matplotlib as mpl
import numpy as np
import pytest
from support.steps.opened_plans import opened_plan
from support.steps.planned_steps import random_plan

from planner.graph.placement import is_partial, is_shard
from planner.plan.decision import ComputeStep
from planner.plan.document import Plan
from planner.plots import (
    ParetoPoint,
    memory_over_time,
    modules_of_plan,
    overhead_over_memory,
    pareto_curve,
    placement_counts,
    placements_by_module,
    predicted_and_measured,
    seconds_over_layers,
)
from planner.view.modules import module_tree
from planner.view.styles import category_name

mpl.use("agg")


@pytest.fixture(scope="module")
def plan() -> Plan:
    found = random_plan("gpt2", (2,), seed=1)
    options = found.decision.options.model_copy(update={"memory_bytes": 3 * 2**30, "reserve_bytes": 2**30})
    return found.model_copy(update={"decision": found.decision.model_copy(update={"options": options})})


def test_memory_is_stacked_to_the_peak_under_the_limit(plan: Plan) -> None:
    (axes,) = memory_over_time(plan).axes
    predicted = plan.decision.predicted
    top = max(path.vertices[:, 1].max() for layer in axes.collections for path in layer.get_paths())
    assert top == pytest.approx(predicted.peak_bytes / 2**30)
    (limit,) = axes.lines
    assert set(np.asarray(limit.get_ydata())) == {2.0}
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert sorted(names) == sorted([*map(category_name, predicted.memory.bytes), "limit"])
    assert "GiB" in axes.get_ylabel()
    assert "instruction" in axes.get_xlabel()


def test_every_result_of_a_first_execution_is_counted_once(plan: Plan) -> None:
    schedule = plan.decision.schedule
    placements = [
        schedule.placements[schedule.buffers[buffer][1]]
        for step in schedule.instructions
        if isinstance(step, ComputeStep) and step.op == "compute"
        for buffer in step.outputs
        if buffer is not None
    ]
    total = sum(placement_counts(plan, depth=3).values(), Counter())
    assert total["partial"] == sum(any(map(is_partial, placement)) for placement in placements)
    assert total["replicated"] == sum(set(placement) == {"R"} for placement in placements)
    assert total["sharded"] == len(placements) - total["partial"] - total["replicated"]
    assert total["sharded"] > 0
    assert any(is_shard(word) for placement in placements for word in placement)


def test_modules_are_told_apart_by_depth(plan: Plan) -> None:
    assert {"transformer.h.0", "transformer.h.1", "lm_head"} <= placement_counts(plan, depth=3).keys()
    assert "transformer.h" in placement_counts(plan, depth=2)


def test_each_module_is_a_bar(plan: Plan) -> None:
    (axes,) = placements_by_module(plan).axes
    counts = placement_counts(plan, depth=3)
    assert [label.get_text() for label in axes.get_yticklabels()] == list(counts)
    assert sum(bar.get_width() for bar in axes.patches) == sum(sum(kinds.values()) for kinds in counts.values())
    assert axes.get_xlabel()
    assert axes.get_ylabel() == "module"


def test_overhead_is_drawn_over_the_limit_with_the_floors_of_others() -> None:
    curves = {"kiwi_chain": [(8.0, 1.5), (4.0, 12.0)], "sharding": [(8.0, 3.0)]}
    (axes,) = overhead_over_memory(curves, "encoder", {"paper": 5.1}).axes
    chain, sharding, floor = axes.lines
    assert [tuple(point) for point in chain.get_xydata()] == [(4.0, 12.0), (8.0, 1.5)]
    assert [tuple(point) for point in sharding.get_xydata()] == [(8.0, 3.0)]
    assert set(floor.get_xdata()) == {5.1}
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["kiwi_chain", "sharding", "paper"]
    assert "(GB)" in axes.get_xlabel()
    assert "(%)" in axes.get_ylabel()


def test_solver_time_is_drawn_over_layers() -> None:
    (axes,) = seconds_over_layers({"kiwi_chain": [(4, 2.0), (1, 0.5)]}, "encoder").axes
    (line,) = axes.lines
    assert [tuple(point) for point in line.get_xydata()] == [(1, 0.5), (4, 2.0)]
    assert axes.get_ylim()[0] == 0
    assert "(s)" in axes.get_ylabel()


def test_the_band_of_a_pareto_curve_lies_between_the_bounds_and_the_plans() -> None:
    gib = 2**30
    points = [
        ParetoPoint(4 * gib, 5.0, 4.5),  # its plan is worse than that of the smaller limit, which holds here too
        ParetoPoint(1 * gib, None, 5.5),  # no plan was found
        ParetoPoint(2 * gib, 4.9, 4.0),  # the bound of the larger limit is better, and holds here too
        ParetoPoint(8 * gib, 4.2, 4.1),
    ]
    (axes,) = pareto_curve({"kiwi_chain": points}, "gpt2").axes
    plans, bounds = axes.lines
    assert list(plans.get_xdata()) == [1.0, 2.0, 4.0, 8.0]
    np.testing.assert_array_equal(plans.get_ydata(), [np.nan, 4.9, 4.9, 4.2])
    np.testing.assert_array_equal(bounds.get_ydata(), [5.5, 4.5, 4.5, 4.1])
    assert plans.get_drawstyle() == "steps-post"
    assert bounds.get_drawstyle() == "steps-pre"
    (band,) = axes.collections
    corners = np.concatenate([path.vertices for path in band.get_paths()])
    between = [(x, y) for x, y in corners if 2 < x < 4]
    assert between == []  # the edges are level from one limit to the next
    for limit, edges in ((2.0, {4.5, 4.9}), (8.0, {4.1, 4.9})):
        assert {round(y, 6) for x, y in corners if x == limit} == edges
    assert "(GiB)" in axes.get_xlabel()
    assert "(s)" in axes.get_ylabel()
    with pytest.raises(ValueError, match="no plan to draw"):
        pareto_curve({"sharding": points[1:2]}, "gpt2")


def test_predicted_and_measured_have_one_scale_and_medians() -> None:
    points = {"matmul": [(1.0, 1.1), (2.0, 2.4), (4.0, 4.0)], "all_gather": [(0.5, 1.0)]}
    (axes,) = predicted_and_measured(points, "time of a step", "s").axes
    assert axes.get_xlim() == axes.get_ylim()
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("predicted time of a step (s)", "measured time of a step (s)")
    labels = [text.get_text() for text in axes.get_legend().get_texts()]
    assert labels[-2:] == ["matmul, median 1.10", "all_gather, median 2.00"]
    assert [tuple(point) for point in axes.lines[-2].get_xydata()] == points["matmul"]
    for empty in ({}, {"matmul": [(0.0, 1.0)]}):
        with pytest.raises(ValueError, match="positive"):
            predicted_and_measured(empty, "time", "s")


@pytest.mark.parametrize("depth", [1, 3])
def test_modules_add_up_to_the_plan(depth: int) -> None:
    opened = opened_plan("serial")
    left, right = modules_of_plan(module_tree(opened), depth).axes
    assert sum(bar.get_width() for bar in left.patches) == pytest.approx(opened.time.total / 1e6)
    assert sum(bar.get_width() for bar in right.patches) == pytest.approx(opened.plan.peak_bytes / 2**20)
    names = [label.get_text() for label in left.get_yticklabels()]
    assert ("transformer.h.0" in names) == (depth == 3)
    assert "(ms)" in left.get_xlabel()
    assert "(MiB)" in right.get_xlabel()
