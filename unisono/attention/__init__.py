"""Attention backends, and the context of a pass that layers read."""
