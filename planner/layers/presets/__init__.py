"""Models of the papers as chains of layers, by formula."""
