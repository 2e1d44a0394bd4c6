"""What to keep for the backward in code that ``torch.compile`` generates, under a limit in bytes."""
