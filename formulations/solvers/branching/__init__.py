"""Exact branch and bound, and branches of a search with a bound from prices."""
