"""What a plan looks like: one HTML page, traces for Perfetto, and snapshots for torch's memory visualizer."""
