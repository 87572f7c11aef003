"""Loading: checkpoints, tensors, slices of ranks, and weight formats."""
