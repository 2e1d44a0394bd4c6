"""The canonical problem, its solutions and the exact checker."""
