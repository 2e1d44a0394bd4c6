"""Layer plans on torch's own engine."""
