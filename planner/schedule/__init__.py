"""The schedule: the explicit list of instructions that is replayed and executed."""
