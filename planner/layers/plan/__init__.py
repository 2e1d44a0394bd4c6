"""The layer plan: document, checks, memory."""
