"""Branches of a search with a bound from prices, and Lagrangian probing."""
