"""Operators and collectives on the local tensors of one rank."""
