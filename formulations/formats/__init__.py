"""Readers and writers of problem files."""
