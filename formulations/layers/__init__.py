"""Layers and pipeline schedules: what all formulations on whole layers share."""
