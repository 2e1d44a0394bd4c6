"""CAPTURE's Figure 7 on local processes."""
