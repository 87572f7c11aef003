"""A load of requests: what is asked (``mixes``), how it is sent (``wire``, ``client``, ``workers``), what came of it.

``serve_bench`` and ``throughput`` are the commands ``unisono bench serve`` and ``unisono bench throughput``.
"""
