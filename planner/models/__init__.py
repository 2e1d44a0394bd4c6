"""References to models, and how they are loaded."""
