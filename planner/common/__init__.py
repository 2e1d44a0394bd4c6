"""Units, and the errors that several rooms raise."""
