"""Solvers of `IntegerProgram`s, the programs of the papers that are no canonical problem."""
