"""Smallest limits that any assignment fits, and why a problem is infeasible."""
