"""One exact reduction of a problem per file."""
