"""The search for the best decision of a step under a memory limit."""
