"""Vision towers: attention, norms, activations and positions."""
