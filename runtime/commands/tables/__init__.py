"""Tables of the command line: a run, its profile, the rows of a benchmark, and figures of a plan."""
