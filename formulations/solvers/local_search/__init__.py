"""Feasible assignments by moves on flat arrays."""
