"""The operator graph of a training step, independent of torch's own."""
