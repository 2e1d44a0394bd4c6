"""The mathematics of the planner: canonical problems, models, solvers and the exact checker."""
