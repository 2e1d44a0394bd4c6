"""Plain methods beside the engine: dynamic programming, a greedy search, and the model in Pyomo."""
