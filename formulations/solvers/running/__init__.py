"""The portfolio, and the public way to solve: solve, check, confirm."""
