"""Tables of the papers that are measured on this machine, beside predictions."""
