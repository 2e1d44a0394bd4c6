"""Clusters: devices and links, calibrated or preset, and the costs that follow from them."""
