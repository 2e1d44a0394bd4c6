"""Methods that only pay where tables are too large for branch and cut: prices with a core, hubs.

The registry alone names them; ``formulations/solvers/running/lanes.py`` decides which lanes they get.
"""
