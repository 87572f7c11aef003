"""Blocks of decoder models: layers, attention, feed-forward, experts, Gated DeltaNet."""
