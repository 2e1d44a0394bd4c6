"""Exploring plans of one step: pins, changes of the cluster, prices of memory, meshes, batches, sweeps."""
