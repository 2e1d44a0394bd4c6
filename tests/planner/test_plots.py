from __future__ import annotations

from collections import Counter
from itertools import combinations

import matplotlib as mpl
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.text import Text
from support.steps.opened_plans import KINDS, opened_plan
from support.steps.planned_steps import random_plan

from planner.common.units import UNITS, axis_unit, format_bytes
from planner.graph.placement import is_partial, is_shard
from planner.plan.decision import ComputeStep
from planner.plan.document import Plan
from planner.plots import (
    ParetoPoint,
    memory_over_time,
    modules_of_plan,
    overhead_by_group,
    overhead_over_memory,
    pareto_curve,
    placement_counts,
    placements_by_module,
    predicted_and_measured,
    seconds_over_layers,
    streams_over_time,
    strips_of_plans,
)
from planner.view.modules import module_tree
from planner.view.styles import category_name
from planner.view.timeline import streams_of

mpl.use("agg")


@pytest.fixture(scope="module")
def plan() -> Plan:
    found = random_plan("gpt2", (2,), seed=1)
    return limited(found, found.decision.predicted.peak_bytes + 2**10)


def limited(found: Plan, limit: int) -> Plan:
    """The plan with a limit of tensors in bytes."""
    options = found.decision.options.model_copy(update={"memory_bytes": limit + 2**30, "reserve_bytes": 2**30})
    return found.model_copy(update={"decision": found.decision.model_copy(update={"options": options})})


def test_memory_is_stacked_to_the_peak_under_the_limit(plan: Plan) -> None:
    figure = memory_over_time(plan)
    (axes,) = figure.axes
    predicted = plan.decision.predicted
    top = max(path.vertices[:, 1].max() for layer in axes.collections for path in layer.get_paths())
    unit, size = axis_unit(predicted.peak_bytes)
    assert top == pytest.approx(predicted.peak_bytes / size)
    limit, peak = axes.lines
    assert set(np.asarray(limit.get_ydata())) == {plan.decision.options.limit_bytes / size}
    assert [tuple(point) for point in peak.get_xydata()] == [(predicted.peak_instruction, predicted.peak_bytes / size)]
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    marked = [
        f"limit, {format_bytes(plan.decision.options.limit_bytes)}",
        f"peak, {format_bytes(predicted.peak_bytes)}",
    ]
    assert sorted(names) == sorted([*map(category_name, predicted.memory.bytes), *marked])
    assert no_overlaps(figure)
    assert f"({unit})" in axes.get_ylabel()
    assert "instruction" in axes.get_xlabel()


def test_a_limit_far_above_is_in_the_legend_alone(plan: Plan) -> None:
    (axes,) = memory_over_time(limited(plan, 2 * plan.decision.predicted.peak_bytes)).axes
    limit, _ = axes.lines
    assert list(limit.get_xdata()) == []
    assert "far above" in limit.get_label()
    peak = plan.decision.predicted.peak_bytes
    assert axes.get_ylim()[1] < 1.5 * peak / axis_unit(peak)[1]


def unit_of(axes: Axes) -> int:
    """Bytes of the unit that the label along an axis names."""
    (size,) = (size for unit, size in UNITS.items() if f"({unit})" in axes.get_xlabel())
    return size


def no_overlaps(figure: Figure) -> bool:
    """Whether no text of a figure lies on another."""
    figure.canvas.draw()
    texts = [text for axes in figure.axes for text in axes.texts]
    texts += [
        label for axes in figure.axes for axis in (axes.xaxis, axes.yaxis) for label in (*shown(axis), axis.label)
    ]
    boxes = [text.get_window_extent() for text in texts if text.get_visible() and text.get_text()]
    return not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def shown(axis: Axis) -> list[Text]:
    """Labels of the ticks within the view, where they are drawn."""
    low, high = sorted(axis.get_view_interval())
    return [
        tick.label1 for tick in axis.get_major_ticks() if tick.label1.get_visible() and low <= tick.get_loc() <= high
    ]


@pytest.mark.parametrize("kind", ["serial", "offloaded"])
def test_the_largest_tensors_at_the_peak_have_names(kind: str) -> None:
    opened = opened_plan(kind, mesh=(2, 2))
    figure = memory_over_time(opened)
    _, below = figure.axes
    largest = opened.report.alive_at_peak[: len(below.patches)]
    unit, size = axis_unit(largest[0].nbytes)
    assert f"({unit})" in below.get_xlabel()
    assert below.get_ylabel() == "tensor"
    assert [bar.get_width() * size for bar in below.patches] == pytest.approx([tensor.nbytes for tensor in largest])
    for tensor, text in zip(largest, below.texts, strict=True):
        assert tensor.name in text.get_text() or " ... " in text.get_text()
        assert category_name(tensor.category) in text.get_text()
    others = sum(tensor.nbytes for tensor in opened.report.alive_at_peak[len(largest) :])
    assert format_bytes(others) in below.get_title(loc="left")

    assert no_overlaps(figure)
    edge = figure.canvas.get_width_height()[0]
    assert all(text.get_window_extent().x1 <= edge for text in below.texts)


@pytest.mark.parametrize("kind", KINDS)
def test_a_timeline_has_every_stream_for_as_long_as_it_is_busy(kind: str) -> None:
    opened = opened_plan(kind, mesh=(2, 2))
    figure = streams_over_time(opened)
    (axes,) = figure.axes
    streams = [label.get_text() for label in axes.get_yticklabels()]
    assert streams == streams_of([opened])
    busy = dict.fromkeys(streams, 0.0)
    for drawn in axes.collections:
        for path in drawn.get_paths():
            (left, bottom), (right, top) = path.vertices.min(axis=0), path.vertices.max(axis=0)
            busy[streams[round((bottom + top) / 2)]] += right - left
    for stream in streams:
        spent = sum(i.end - i.start for i in opened.intervals if i.stream == stream)
        assert busy[stream] * 1e6 == pytest.approx(spent)
    assert {text.get_text() for text in axes.get_legend().get_texts()} == {i.group for i in opened.intervals}
    assert "(ms)" in axes.get_xlabel()
    assert axes.get_ylabel() == "stream"
    assert no_overlaps(figure)


def test_a_part_of_a_timeline_has_what_runs_in_it() -> None:
    opened = opened_plan("serial")
    whole = opened.time.total / 1e6
    (axes,) = streams_over_time(opened, whole / 4, whole / 2).axes
    assert axes.get_xlim() == pytest.approx((whole / 4, whole / 2))
    inside = {i.group for i in opened.intervals if i.start < opened.time.total / 2 and i.end > opened.time.total / 4}
    assert {text.get_text() for text in axes.get_legend().get_texts()} == inside
    for start, end in ((2.0, 1.0), (whole, 2 * whole), (-1.0, whole)):
        with pytest.raises(ValueError, match="give a part of the step"):
            streams_over_time(opened, start, end)


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
    (axes,) = seconds_over_layers({"kiwi_chain": [(1, 0.5), (2, 2.0)]}, "encoder").axes
    assert all(tick == round(tick) for tick in axes.get_xticks())


def test_strips_have_a_bar_for_each_run_of_layers() -> None:
    (axes,) = strips_of_plans({"paper": [[(2, "DP"), (1, "SDP")], [(3, "DP")]], "ours": [[(6, "DP")]]}, "six").axes
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0, 2), (2, 1), (3, 3), (0, 6)]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("layer", "plan")
    assert [label.get_text() for label in axes.get_yticklabels()] == ["paper", "ours"]


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
    (label,) = {text.get_text() for text in axes.get_legend().get_texts()} - {"plan", "bound"} or {None}
    assert label is None, "there are no others"
    with pytest.raises(ValueError, match="no plan to draw"):
        pareto_curve({"sharding": points[1:2]}, "gpt2")


def test_curves_that_are_the_same_share_a_panel_and_others_are_grey_in_it() -> None:
    gib = 2**30
    wide = [ParetoPoint(gib, 9.0, 5.0), ParetoPoint(2 * gib, 5.0, 4.0)]
    near = [ParetoPoint(gib, 9.001, 5.0), ParetoPoint(2 * gib, 5.0, 4.0)]
    narrow = [ParetoPoint(gib, None, None), ParetoPoint(2 * gib, 5.0, 4.0)]
    figure = pareto_curve({"kiwi_chain": wide, "sharding": narrow, "kiwi_offload": near}, "gpt2")
    panels = {axes.get_title(): axes for axes in figure.axes}
    assert list(panels) == ["sharding", "kiwi_chain = kiwi_offload"]
    assert len({(axes.get_xlim(), axes.get_ylim()) for axes in figure.axes}) == 1
    for axes in figure.axes:
        other, plans, _ = axes.lines
        assert other.get_label() == "plans of others"
        assert plans.get_label() == "plan"
    np.testing.assert_array_equal(panels["sharding"].lines[0].get_ydata(), [9.0, 5.0])
    assert no_overlaps(figure)


def test_groups_of_curves_have_panels_of_their_own() -> None:
    same = [(1.0, 5.0), (2.0, 1.0)]
    figure = overhead_by_group({"osdp": {"published": same, "exact": same}, "h3t": {}, "capture": {"exact": same}}, "t")
    assert [axes.get_title() for axes in figure.axes] == ["osdp", "h3t", "capture"]
    below, above = figure.axes[0].lines
    assert below.get_linewidth() > above.get_linewidth()
    assert below.get_markersize() > above.get_markersize()
    assert [text.get_text() for text in figure.axes[0].get_legend().get_texts()] == ["published", "exact"]
    assert all("(GB)" in axes.get_xlabel() for axes in figure.axes)
    assert "(%)" in figure.axes[0].get_ylabel()
    alike = overhead_by_group({"osdp": {"exact": same}, "h3t": {"exact": []}}, "t", "limit (%)")
    assert [axes.get_xlabel() for axes in alike.axes] == ["limit (%)"] * 2
    assert [axes.get_legend() for axes in alike.axes] == [None, None]
    assert [text.get_text() for legend in alike.legends for text in legend.get_texts()] == ["exact"]
    assert no_overlaps(alike)
    assert no_overlaps(figure)


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
    assert sum(bar.get_width() for bar in right.patches) == pytest.approx(opened.plan.peak_bytes / unit_of(right))
    for axes in (left, right):
        assert max(bar.get_x() + bar.get_width() for bar in axes.patches) < 0.98 * axes.get_xlim()[1]
    names = [label.get_text() for label in left.get_yticklabels()]
    assert ("transformer.h.0" in names) == (depth == 3)
    assert "(ms)" in left.get_xlabel()
