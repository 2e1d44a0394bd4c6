"""Instances of the canonical problem: files of the solver contest and generated families."""
