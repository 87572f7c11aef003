"""Adapters (LoRA): checkpoints, and copies in host memory."""
