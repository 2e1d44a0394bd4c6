"""Plans in a training loop of one's own: ``load``, ``Trainer``, weights and checkpoints."""
