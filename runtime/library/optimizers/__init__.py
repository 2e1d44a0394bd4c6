"""Optimizers of the user over the shards of a rank."""
