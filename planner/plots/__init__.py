"""Figures for papers and notebooks, readable in black and white.

matplotlib is imported when a figure is drawn; every function returns the figure and shows nothing itself.
"""

from planner.plots.limits import overhead_by_group, overhead_over_memory, seconds_over_layers
from planner.plots.measured import predicted_and_measured
from planner.plots.memory import memory_over_time, placement_counts, placements_by_module
from planner.plots.modules import modules_of_plan
from planner.plots.pareto import ParetoPoint, pareto_curve
from planner.plots.solvers import performance_profile, time_ratios
from planner.plots.streams import streams_over_time
from planner.plots.strips import strips_of_plans

__all__ = [
    "ParetoPoint",
    "memory_over_time",
    "modules_of_plan",
    "overhead_by_group",
    "overhead_over_memory",
    "pareto_curve",
    "performance_profile",
    "placement_counts",
    "placements_by_module",
    "predicted_and_measured",
    "seconds_over_layers",
    "streams_over_time",
    "strips_of_plans",
    "time_ratios",
]
