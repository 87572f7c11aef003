"""``unisono bench``: latency, exactness, drafters, adaptive speculation, soak."""
