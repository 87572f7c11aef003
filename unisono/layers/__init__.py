"""Layers: linear, norms, rotary embedding, experts, and their weight formats."""
