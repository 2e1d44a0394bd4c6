"""From a PyTorch training step, a cluster and a memory limit to a checked plan."""
