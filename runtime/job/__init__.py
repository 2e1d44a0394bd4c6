"""Processes of a run: launch, process groups, options of a rank."""
