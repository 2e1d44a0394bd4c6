"""Galvatron-BMW on real models."""
