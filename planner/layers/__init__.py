"""Plans of whole layers."""
