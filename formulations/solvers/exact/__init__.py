"""Exact solvers: enumeration, HiGHS and CP-SAT."""
