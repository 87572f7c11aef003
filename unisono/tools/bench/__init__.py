"""``unisono bench``: ``latency`` and ``exact``; ``serve`` and ``throughput`` are in ``tools/load``."""
