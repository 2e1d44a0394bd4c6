"""Tracing a training step to one forward and backward graph."""
