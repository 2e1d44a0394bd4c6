"""Figures for papers and notebooks, readable in black and white.

matplotlib is imported when a figure is drawn; every function returns the figure and shows nothing itself.
"""

from planner.plots.limits import ParetoPoint, overhead_over_memory, pareto_curve, seconds_over_layers
from planner.plots.measured import predicted_and_measured
from planner.plots.memory import memory_over_time, placement_counts, placements_by_module
from planner.plots.modules import modules_of_plan
from planner.plots.solvers import performance_profile, time_ratios

__all__ = [
    "ParetoPoint",
    "memory_over_time",
    "modules_of_plan",
    "overhead_over_memory",
    "pareto_curve",
    "performance_profile",
    "placement_counts",
    "placements_by_module",
    "predicted_and_measured",
    "seconds_over_layers",
    "time_ratios",
]
