"""Column generation over repeated blocks."""
