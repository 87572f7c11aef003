"""RMSNorm and its fused forms, and activations."""
