"""H3T on real models."""
