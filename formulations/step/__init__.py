"""A training step as a canonical problem: sharding, recomputation and liveness."""
