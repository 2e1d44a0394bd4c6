"""A run measured and compared with one process."""
