"""From a decision to a schedule."""
