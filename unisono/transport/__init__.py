"""Transport of bytes between engines: addresses, channels, and the proof that both ends share a key.

The content of the bytes is opaque here. A channel carries messages (small) with payloads (large), in order, both ways.
"""
