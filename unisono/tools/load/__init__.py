"""Load generation: conversations (``mixes``), sending (``wire``, ``client``, ``workers``) and results (``figures``).

``serve_bench`` and ``throughput`` are the commands ``unisono bench serve`` and ``unisono bench throughput``.
"""
