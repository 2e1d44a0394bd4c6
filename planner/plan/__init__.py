"""The plan: its document, certificate and checks."""
