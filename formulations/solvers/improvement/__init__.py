"""Better assignments from a feasible one."""
