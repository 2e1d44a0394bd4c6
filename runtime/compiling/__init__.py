"""``torch.compile`` on one device under a limit in bytes."""
