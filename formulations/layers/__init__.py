"""Layers and pipeline schedules, shared by all formulations on whole layers."""
