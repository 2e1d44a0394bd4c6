"""Sharding rules of operators: candidates, verification, cache."""
