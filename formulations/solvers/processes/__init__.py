"""Solvers in worker processes."""
