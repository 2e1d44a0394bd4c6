"""H3T: seven switches per layer; simulator, published searches and exact ones."""
