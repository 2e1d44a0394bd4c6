"""Tables of the command line: a run, its profile, and the rows of a benchmark."""
