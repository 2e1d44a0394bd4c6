"""One published model per file; each builds a :class:`~formulations.problem.StrategyProblem`."""
