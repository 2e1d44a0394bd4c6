"""The problem while it is being reduced, and the way back from a solution of what remains."""
