"""CAPTURE on real models."""
