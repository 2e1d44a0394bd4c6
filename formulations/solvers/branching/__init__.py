"""Branch and bound on memory prices."""
