"""Adapters (LoRA): checkpoints, and copies in host memory.

``passes/features/adapters.py`` places adapters on the device and assigns rows to them, ``kernels/lora`` computes them,
and ``http/adapters.py`` has the names that clients use.
"""
