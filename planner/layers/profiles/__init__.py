"""A traced step folded into a chain of layers, and profile files."""
