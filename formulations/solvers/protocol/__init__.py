"""What every solver follows, how solvers exchange results, and the registry of their names."""
