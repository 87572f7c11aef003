"""``unisono eval``: held-out problems, and the accuracy of a model on them."""
