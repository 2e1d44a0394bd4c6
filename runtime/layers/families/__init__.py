"""The model families that layer plans run."""
