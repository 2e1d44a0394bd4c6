"""Large neighbourhood search from a feasible assignment."""
