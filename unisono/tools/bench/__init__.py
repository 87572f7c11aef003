"""``unisono bench``: ``latency``, ``exact`` and ``drafters``; ``serve`` and ``throughput`` are in ``tools/load``."""
