"""Checks of a device: ``python -m runtime.gpu_check``."""
