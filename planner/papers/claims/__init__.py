"""Claims of the five papers, each beside our number."""
