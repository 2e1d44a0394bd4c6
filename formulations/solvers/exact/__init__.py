"""Exact solvers: enumeration, dynamic programming, HiGHS and CP-SAT."""
