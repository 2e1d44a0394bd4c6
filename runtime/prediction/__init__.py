"""Predictions beside runs: costs from plans that ran, and how well other plans are predicted."""
