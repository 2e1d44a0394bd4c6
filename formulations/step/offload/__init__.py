"""Offload of activations to host memory as part of a step's problem."""
