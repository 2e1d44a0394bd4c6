"""Operator plans: a schedule lowered to a local graph."""
