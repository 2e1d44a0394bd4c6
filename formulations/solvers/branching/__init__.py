"""Price and branch, and Lagrangian probing."""
