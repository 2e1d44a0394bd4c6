"""Lagrangian prices of memory: dual bounds, and assignments decoded from them."""
