"""Moving bytes between engines: addresses, channels, and how two ends prove that they share a key.

Nothing here knows what the bytes are. A channel carries messages (small) with payloads (large), in order, both ways.
"""
