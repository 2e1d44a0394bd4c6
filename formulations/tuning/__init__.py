"""The constants that steer the engine: what there is, and other values for one run."""
