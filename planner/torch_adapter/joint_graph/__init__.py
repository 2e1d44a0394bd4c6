"""The joint graph of ``torch.compile``: read as kernels, and partitioned by a decision."""
