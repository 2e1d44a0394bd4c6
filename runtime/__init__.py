"""From a plan to a running ``torch.distributed`` job. Imports with torch, numpy and pydantic alone."""
