"""Communication beside the computation: what may overlap, when it starts and ends, and bounds on all such plans."""
