"""Methods that only pay on very large tables: annealing with hub moves, and branching on hubs.

``formulations/solvers/running/lanes.py`` decides by :func:`formulations.solvers.prices.bounding.is_wide` whether a
problem is that large. Then one lane runs ``annealing``, and the lane of ``price_and_branch`` branches on hubs.
"""
